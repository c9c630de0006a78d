"""Assembles an engine: finds every module by its name in the configuration and wires them together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING
from weakref import finalize

from sagellm.core import (
    WHOLE,
    AttentionBackendProtocol,
    AttentionMetrics,
    ConfigError,
    EngineProtocol,
    KVLayout,
    ModelGeometry,
    ModelSpec,
    PluginRegistry,
    ProviderSpec,
    Runtime,
    UnsupportedModelError,
    get_logger,
)
from sagellm.core.protocols.engine import EngineInfo, RequestLimits
from sagellm.core.protocols.forward import StepLimits
from sagellm.engines.attention.progress_hook import ProgressHook, ProgressReportingAttention
from sagellm.engines.config.schema import EngineConfig
from sagellm.engines.engine_core.building import CorePlan, build_core
from sagellm.engines.engine_core.core import EngineCore
from sagellm.engines.engine_core.kv_tiers import read_tiers
from sagellm.engines.engine_core.num_blocks import find_num_blocks
from sagellm.engines.forward.choice import make_backend
from sagellm.engines.forward.free_cores import FreeCores
from sagellm.engines.grammar.making import make_grammar
from sagellm.engines.loading.device_and_dtype import device_name
from sagellm.engines.loading.fingerprint import fingerprint_of
from sagellm.engines.loading.load import open_model
from sagellm.engines.loading.source import resolve_tokenizer
from sagellm.engines.loading.tokenizer import open_tokenizer
from sagellm.engines.modules import Modules as Modules, engine, logits_processors
from sagellm.engines.recording.recorder import Recorder
from sagellm.engines.sampling.params import SamplingParams
from sagellm.engines.step_trace import count_work, open_step_trace
from sagellm.engines.worker.building import build_worker

if TYPE_CHECKING:
    from sagellm.core import ForwardBackendProtocol, SparsifierProtocol, WeightSource
    from sagellm.engines.text.tokenizer import Tokenizer

logger = get_logger(__name__)

SCALED = frozenset({"int8", "float8_e4m3fn"})
"""Number formats of KV that need scales."""


@dataclass(frozen=True, kw_only=True)
class AssembledEngine:
    """An engine and its front, ready to run. `config` has the values chosen for "auto"."""

    config: EngineConfig
    core: EngineProtocol
    tokenizer: Tokenizer | None
    default_params: SamplingParams
    runtime: Runtime


def build_computing_core(
    plan: CorePlan,
    backend: ForwardBackendProtocol,
    *,
    around_step: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> EngineCore:
    """Build a core that computes: around a forward backend, which has no KV yet.

    A step's forward pass and sampling run inside the context of `around_step`.
    """
    modules = plan.modules
    processors = logits_processors(modules, plan.vocab_size)
    worker = build_worker(plan, backend, processors, around_step)  # first: it raises if the KV exceeds memory
    executor = modules.make("executor", modules.config.forward.executor, worker)
    with ExitStack() as on_failure:
        on_failure.callback(executor.close)
        core = build_core(plan, executor, worker)
        on_failure.pop_all()
    core.add_metrics("forward_backend", backend.metrics)
    core.add_metrics("logits_processor", lambda: {name: one.metrics() for name, one in processors.items()})
    return core


def assemble(
    config: EngineConfig, *, registry: PluginRegistry | None = None, runtime: Runtime | None = None
) -> AssembledEngine:
    """Build the engine that a configuration names, and its front."""
    runtime = runtime or Runtime.system(seed=config.model.seed)
    core = engine(Modules(registry or PluginRegistry.load(), config), runtime)
    info = core.info
    config = config.with_values(info.settings)
    tokenizer = info.tokenizer or open_tokenizer(resolve_tokenizer(config.model))
    return AssembledEngine(
        config=config,
        core=core,
        tokenizer=tokenizer,
        default_params=SamplingParams(**info.default_params),
        runtime=runtime,
    )


def load_core(config: EngineConfig, *, registry: PluginRegistry, runtime: Runtime) -> EngineCore:
    """Load the model that a configuration names and build a core around it: the engine `llm`."""
    device = device_name(config.model.device)
    cores = FreeCores() if device == "cpu" else None  # first: it measures during loading
    config = config.with_values({"model.device": device})
    modules = Modules(registry, config)
    read_tiers(modules)  # so that errors are found before loading
    trace = open_step_trace(config, runtime.clock)
    recorder = Recorder.opened(config.recording, runtime.clock, config.kv.block_size)
    quantizer = modules.make_optional("quantizer", config.model.quantization)
    sparsifier = modules.make_optional("sparsifier", config.model.sparsity)
    opened = open_model(config.model, registry)
    geometry, spec = opened.spec.geometry, opened.spec
    default_params = opened.generation.checked_params()
    kv_dtype = opened.dtype_name if config.kv.dtype == "auto" else config.kv.dtype
    layout = _layout(spec, kv_dtype, config.kv.block_size)
    max_model_len, reason = _max_model_len(config, geometry)
    progress = ProgressHook()
    attention = _Attention(modules, geometry, layout, progress)
    with opened.reading() as weights:
        chosen = make_backend(
            modules,
            spec,
            _pruned(weights, spec, sparsifier, device),
            extra_features=_extra_features(config, opened.dtype_name, kv_dtype),
            device=device,
            dtype=opened.dtype_name,
            attention=attention.make,
            quantizer=quantizer,
            sparsifier=sparsifier,
            shard=WHOLE,
            **_packed_cache(config),
        )
    backend = chosen.backend
    limits = StepLimits(
        max_model_len=max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
    )
    reserved_bytes = backend.expect_steps([layout], limits)
    num_blocks = config.kv.num_blocks or find_num_blocks(
        layout,
        geometry,
        limits,
        device=device,
        fraction=config.kv.memory_fraction,
        reserved_bytes=reserved_bytes,
    )
    config = config.with_values({"model.dtype": opened.dtype_name, "kv.num_blocks": num_blocks})
    plan = CorePlan(
        modules=modules,
        layout=layout,
        num_blocks=num_blocks,
        vocab_size=geometry.vocab_size,
        runtime=runtime,
        geometry=geometry,
        fingerprint=partial(fingerprint_of, opened.files, config.model),
        trace=trace,
        progress=progress,
        make_grammar=partial(make_grammar, modules, opened, geometry.vocab_size),
        recorder=recorder,
    )
    core = build_computing_core(
        plan, backend, around_step=nullcontext if cores is None else cores.during_step
    )
    for each in (trace, recorder):  # at the latest when the process ends: until then their ends are missing
        finalize(core, each.close)
    count_work(core, plan, spec, opened.dtype_name)
    weight_bytes = backend.model_metrics().weight_bytes
    core.add_metrics("work", lambda: core.runner.work.metrics(geometry, layout, weight_bytes))
    core.add_metrics("model_family", backend.model_metrics)
    core.add_metrics("attention_backend", attention.metrics)
    for kind, made in (("quantizer", quantizer), ("sparsifier", sparsifier)):
        if made is not None:
            core.add_metrics(kind, made.metrics)
    request_limits = RequestLimits(
        vocab_size=geometry.vocab_size,
        max_model_len=max_model_len,
        max_model_len_reason=reason,
        num_blocks=num_blocks,
        block_size=layout.block_size,
        eos_token_ids=opened.generation.eos_token_ids,
        hidden_size=geometry.hidden_size if "hidden_states" in (backend.features or ()) else 0,
        hidden_size_reason=f"the forward backend {chosen.name} cannot return hidden states; "
        "leave the parameter out, or name another backend in forward.backend",
        extra_args=core.worker.sampler.extra_args,
    )
    core.info = EngineInfo(
        limits=request_limits,
        settings={
            "model.device": device,
            "model.dtype": opened.dtype_name,
            "kv.num_blocks": num_blocks,
            "kv.dtype": kv_dtype,
            "forward.backend": ProviderSpec(chosen.name, config.forward.backend.options).plain(),
        },
        refusals=chosen.refusals,
        default_params=default_params,
        tokenizer=opened.tokenizer,
        geometry=geometry,
        layout=layout,
    )
    return core


class _Attention:
    """The attention backend of a configuration, made for a forward backend that needs one."""

    def __init__(
        self, modules: Modules, geometry: ModelGeometry, layout: KVLayout, progress: ProgressHook
    ) -> None:
        self._modules, self._geometry, self._layout = modules, geometry, layout
        self._progress = progress
        self._made: AttentionBackendProtocol | None = None

    def make(self) -> AttentionBackendProtocol:
        """Make it, once, so that it reports progress. Raises UnsupportedModelError for such heads."""
        if self._made is None:
            sizes = self._geometry
            made = self._modules.make(
                "attention_backend",
                self._modules.config.forward.attention,
                num_heads=sizes.num_heads,
                num_kv_heads=sizes.num_kv_heads,
                head_dim=sizes.head_dim,
                block_size=self._layout.block_size,
            )
            self._made = ProgressReportingAttention(made, self._progress)
        return self._made

    def metrics(self) -> AttentionMetrics:
        """Return its counts; zeros if nothing needed it."""
        return AttentionMetrics() if self._made is None else self._made.metrics()


def _layout(spec: ModelSpec, dtype_name: str, block_size: int) -> KVLayout:
    groups = spec.kv_groups(dtype_name)
    if len(groups) != 1:
        raise UnsupportedModelError(
            f"the layers of {spec.architecture} keep KV of {len(groups)} shapes; one is supported"
        )
    scale_bytes = 4 * block_size if dtype_name in SCALED else 0  # a float32 per token
    return KVLayout(group=replace(groups[0], scale_bytes_per_head=scale_bytes), block_size=block_size)


def _pruned(
    weights: WeightSource, spec: ModelSpec, sparsifier: SparsifierProtocol | None, device: str
) -> WeightSource:
    """Return the weights, pruned if there is a sparsifier: with torch, which others do without."""
    if sparsifier is None:
        return weights
    import torch

    from sagellm.accel.pruned_weights import PrunedWeights

    return PrunedWeights(weights, spec, sparsifier, torch.device(device))


def _packed_cache(config: EngineConfig) -> dict[str, str]:
    """Return the argument of a forward backend for a folder of packed weights, if there is to be one."""
    folder = config.model.packed_cache
    if folder is not None and config.model.sparsity is not None:
        raise ConfigError(
            "model.packed_cache keeps weights by their checkpoint's files, and model.sparsity changes them; "
            "leave one of them out"
        )
    return {} if folder is None else {"packed_cache": folder}


def _extra_features(config: EngineConfig, dtype_name: str, kv_dtype: str) -> set[str]:
    """Return what the configuration asks of a forward backend beyond what the model needs."""
    wanted = set() if kv_dtype == dtype_name else {f"kv_{kv_dtype}"}
    if config.forward.deterministic:
        wanted.add("batch_invariant")
    is_default = config.forward.attention == type(config.forward)().attention
    return wanted if is_default else wanted | {"attention_backends"}


def _max_model_len(config: EngineConfig, geometry: ModelGeometry) -> tuple[int, str]:
    wanted = config.model.max_model_len
    if wanted is None:
        return geometry.max_model_len, geometry.max_model_len_reason
    if wanted > geometry.max_model_len:
        raise ConfigError(
            f"model.max_model_len is {wanted}; this model takes at most {geometry.max_model_len} tokens "
            f"({geometry.max_model_len_reason})"
        )
    return wanted, "model.max_model_len"
