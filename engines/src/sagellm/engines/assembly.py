"""Assembles an engine: finds every module by its name in the configuration and wires them together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import finalize

from sagellm.core import (
    PASS_WATCHERS,
    WHOLE,
    CheckpointError,
    ChromeTraceWriter,
    Clock,
    ConfigError,
    EngineInfo,
    EngineProtocol,
    ExecutorProtocol,
    InvalidRequestError,
    KVIdentity,
    KVLayout,
    KVMemory,
    KVOffloadProtocol,
    LifetimePredictorProtocol,
    ModelGeometry,
    ModelSpec,
    NullTrace,
    PluginRegistry,
    ProviderSpec,
    RequestLimits,
    Runtime,
    StepCostMetrics,
    TraceWriter,
    UnsupportedModelError,
    get_logger,
)
from sagellm.engines.attention.progress_hook import ProgressHook, ProgressReportingAttention
from sagellm.engines.config.schema import EngineConfig
from sagellm.engines.engine_core.batching import BatchingMeter
from sagellm.engines.engine_core.core import CoreParts, EngineCore
from sagellm.engines.engine_core.kv_modules import build_kv
from sagellm.engines.engine_core.kv_tiers import build_offload, build_saves, read_tiers
from sagellm.engines.engine_core.num_blocks import KVDemand, find_num_blocks
from sagellm.engines.engine_core.pass_admin import PassAdmin
from sagellm.engines.engine_core.scheduler import DraftProposer, Scheduler
from sagellm.engines.engine_core.seats import Seats
from sagellm.engines.engine_core.step_cost_fit import StepCostFit
from sagellm.engines.engine_core.step_runner import StepRunner
from sagellm.engines.forward.choice import make_backend
from sagellm.engines.forward.free_cores import FreeCores
from sagellm.engines.loading.device_and_dtype import resolve_device
from sagellm.engines.loading.fingerprint import fingerprint_of
from sagellm.engines.loading.generation_defaults import NAMES_IN_FILE, GenerationDefaults
from sagellm.engines.loading.load import open_model
from sagellm.engines.loading.source import resolve_tokenizer
from sagellm.engines.loading.tokenizer import open_tokenizer
from sagellm.engines.modules import Modules as Modules, engine, extra_args, logits_processors
from sagellm.engines.sampling import draws
from sagellm.engines.sampling.params import SamplingParams
from sagellm.engines.sampling.sampler import Sampler
from sagellm.engines.worker.model_runner import ModelRunner
from sagellm.engines.worker.seat_state import SeatState
from sagellm.engines.worker.step_graphs import StepGraphs
from sagellm.engines.worker.worker import Worker

if TYPE_CHECKING:
    from sagellm.core import ForwardBackendProtocol
    from sagellm.engines.text.tokenizer import Tokenizer

logger = get_logger(__name__)

SCALED = frozenset({"int8", "float8_e4m3fn"})
"""Number formats of KV that need scales."""


CPU_STEP_MS, GPU_STEP_MS = 250.0, 50.0
"""How long a step may take while others decode or wait, unless the configuration says."""


@dataclass(frozen=True, kw_only=True)
class AssembledEngine:
    """An engine and its front, ready to run. `config` has the values chosen for "auto"."""

    config: EngineConfig
    core: EngineProtocol
    tokenizer: Tokenizer | None
    default_params: SamplingParams
    runtime: Runtime


@dataclass(frozen=True, kw_only=True)
class StandIns:
    """Modules of a simulation, in place of those that the configuration names; None: as configured."""

    executor: ExecutorProtocol | None = None
    predictor: LifetimePredictorProtocol | None = None
    make_offload: Callable[[KVMemory], KVOffloadProtocol] | None = None


def build_core(  # noqa: PLR0913
    modules: Modules,
    backend: ForwardBackendProtocol,
    layout: KVLayout,
    *,
    num_blocks: int,
    vocab_size: int,
    runtime: Runtime,
    fingerprint: Callable[[], str] = str,
    trace: TraceWriter | None = None,
    around_step: Callable[[], AbstractContextManager[object]] = nullcontext,
    progress: ProgressHook | None = None,
    propose: DraftProposer | None = None,
    stand_ins: StandIns | None = None,
) -> EngineCore:
    """Build a core around a forward backend that has no KV yet. The core closes `trace`.

    `fingerprint` returns a value that is equal for models with interchangeable KV; it is called when a tier
    or a save first needs it. A step's forward pass and sampling run inside the context of `around_step`;
    `progress` is the hook that the backend calls. `propose` guesses tokens that a step then verifies.
    """
    config, given = modules.config, stand_ins or StandIns()
    runner = ModelRunner(backend, layout=layout, device=resolve_device(config.model.device))
    runner.initialize_kv_caches(num_blocks)  # first: it raises if they exceed memory
    identity = KVIdentity(fingerprint() if config.kv.tiers else "", layout.signature, layout.group.dtype)
    processors = logits_processors(modules, vocab_size)
    draw = draws.device_draw(runner.device)
    sampler = Sampler(
        processors.values(),
        extra_args(modules, processors),
        labels=[modules.label("logits_processor", name) for name in processors],
        draw=draw if runner.device.type == "cpu" else None,  # on a GPU the kernel is for whole steps
    )
    num_seats, block_size = config.scheduler.max_num_seqs, layout.block_size
    state = SeatState(num_seats, block_size=block_size)
    cost_fit = StepCostFit()
    graphs = StepGraphs(state, layout, trace=trace, cost=lambda: cost_fit.cost)
    worker = Worker(runner, sampler, state, graphs=graphs, around=around_step, draw=draw)
    executor = given.executor or modules.make("executor", config.forward.executor, worker)
    with ExitStack() as on_failure:
        on_failure.callback(executor.close)
        seats = Seats(num_seats, block_size=block_size)
        label = modules.label("executor", config.forward.executor.name)
        steps = StepRunner(executor, seats, runtime.clock, label=label, vocab_size=vocab_size)
        memory = KVMemory(steps, layout.block_size, layout.block_bytes, identity)
        offload = (
            given.make_offload(memory) if given.make_offload else build_offload(modules, memory, runtime)
        )
        kv = build_kv(modules, seats, num_blocks, runtime.clock, identity=identity, offload=offload)
        predictor = given.predictor or modules.make("lifetime_predictor", config.predictor.name)
        scheduler: Scheduler
        ir = modules.make(
            "scheduler",
            config.scheduler.name,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            max_num_seqs=config.scheduler.max_num_seqs,
            block_size=layout.block_size,
            probe=lambda request: scheduler.probe(request),
            epoch=lambda: kv.manager.epoch,
            clock=runtime.clock,
            cost=lambda: cost_fit.cost,
            step_target_ms=_step_target_ms(config),
        )
        passes = PassAdmin(ir, modules)
        if config.scheduler.print != "none":
            ir.watch(PASS_WATCHERS[config.scheduler.print]())
        batching = BatchingMeter(
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            max_num_seqs=config.scheduler.max_num_seqs,
        )
        scheduler = Scheduler(
            ir,
            kv.manager,
            batching,
            now_ns=runtime.clock.now_ns,
            propose=propose,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            vocab_size=vocab_size,
        )
        core = EngineCore(
            CoreParts(
                scheduler=scheduler,
                kv=kv.manager,
                saves=build_saves(modules, memory, kv.manager, fingerprint, runtime),
                steps=steps,
                executor=executor,
                worker=worker,
                predictor=predictor,
                registry=modules.registry,
                runtime=runtime,
                cost_fit=cost_fit,
                passes=passes,
                trace=trace or NullTrace(),
                metrics_of={
                    **kv.metrics_of,
                    "scheduler": ir.metrics,
                    "step_cost": lambda: StepCostMetrics(
                        cost=cost_fit.cost, step_target_ms=_step_target_ms(config)
                    ),
                    "batching": batching.metrics,
                    "forward_backend": backend.metrics,
                    "logits_processor": lambda: {name: one.metrics() for name, one in processors.items()},
                },
                progress=progress or ProgressHook(),
            )
        )
        on_failure.pop_all()
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
    device = resolve_device(config.model.device)
    cores = FreeCores() if device.type == "cpu" else None  # first: it measures during loading
    config = config.with_values({"model.device": str(device)})
    modules = Modules(registry, config)
    read_tiers(modules)  # so that errors are found before loading
    trace = open_trace(config.trace.file, runtime.clock)
    quantizer = None
    if config.model.quantization is not None:
        quantizer = modules.make("quantizer", config.model.quantization)
    opened = open_model(config.model, registry)
    geometry, spec = opened.spec.geometry, opened.spec
    default_params = _default_params(opened.generation)
    kv_dtype = opened.dtype_name if config.kv.dtype == "auto" else config.kv.dtype
    layout = _layout(spec, kv_dtype, config.kv.block_size)
    max_model_len, reason = _max_model_len(config, geometry)
    progress = ProgressHook()
    attention = modules.make(
        "attention_backend",
        config.forward.attention,
        num_heads=geometry.num_heads,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        block_size=layout.block_size,
    )
    with opened.reading() as weights:
        chosen = make_backend(
            modules,
            spec,
            weights,
            extra_features=_extra_features(config, opened.dtype_name, kv_dtype),
            device=device,
            dtype=opened.dtype,
            attention=ProgressReportingAttention(attention, progress),
            quantizer=quantizer,
            shard=WHOLE,
        )
    backend = chosen.backend
    num_blocks = config.kv.num_blocks or _fitting_blocks(config, layout, geometry, max_model_len)
    config = config.with_values({"model.dtype": opened.dtype_name, "kv.num_blocks": num_blocks})
    core = build_core(
        modules,
        backend,
        layout,
        num_blocks=num_blocks,
        vocab_size=geometry.vocab_size,
        runtime=runtime,
        fingerprint=partial(fingerprint_of, opened.files, config.model),
        trace=trace,
        around_step=nullcontext if cores is None else cores.during_step,
        progress=progress,
    )
    finalize(core, trace.close)  # at the latest when the process ends: until then its last events are missing
    weight_bytes = backend.model_metrics().weight_bytes
    core.add_metrics("work", lambda: core.runner.work.metrics(geometry, layout, weight_bytes))
    core.add_metrics("model_family", backend.model_metrics)
    core.add_metrics("attention_backend", attention.metrics)
    if quantizer is not None:
        core.add_metrics("quantizer", quantizer.metrics)
    limits = RequestLimits(
        vocab_size=geometry.vocab_size,
        max_model_len=max_model_len,
        max_model_len_reason=reason,
        num_blocks=num_blocks,
        block_size=layout.block_size,
        eos_token_ids=opened.generation.eos_token_ids,
        extra_args=core.parts.worker.sampler.extra_args,
    )
    core.info = EngineInfo(
        limits=limits,
        settings={
            "model.device": str(device),
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


def open_trace(path: str | None, clock: Clock) -> TraceWriter:
    """Return a tracer that writes to this file, or nowhere. Raises ConfigError if it cannot be written."""
    if path is None:
        return NullTrace()
    try:
        return ChromeTraceWriter(path, clock)
    except OSError as error:
        raise ConfigError(
            f"trace.file is {path!r}, which cannot be written: {error.strerror}; name another file"
        ) from error


def _step_target_ms(config: EngineConfig) -> float:
    if config.scheduler.step_target_ms is not None:
        return config.scheduler.step_target_ms
    is_gpu = resolve_device(config.model.device).type == "cuda"
    return GPU_STEP_MS if is_gpu else CPU_STEP_MS


def _layout(spec: ModelSpec, dtype_name: str, block_size: int) -> KVLayout:
    groups = spec.kv_groups(dtype_name)
    if len(groups) != 1:
        raise UnsupportedModelError(
            f"the layers of {spec.architecture} keep KV of {len(groups)} shapes; one is supported"
        )
    scale_bytes = 4 * block_size if dtype_name in SCALED else 0  # a float32 per token
    return KVLayout(group=replace(groups[0], scale_bytes_per_head=scale_bytes), block_size=block_size)


def _extra_features(config: EngineConfig, dtype_name: str, kv_dtype: str) -> set[str]:
    """Return what the configuration asks of a forward backend beyond what the model needs."""
    wanted = set() if kv_dtype == dtype_name else {f"kv_{kv_dtype}"}
    if config.forward.deterministic:
        wanted.add("batch_invariant")
    is_default = config.forward.attention == type(config.forward)().attention
    return wanted if is_default else wanted | {"attention_backends"}


def _fitting_blocks(
    config: EngineConfig, layout: KVLayout, geometry: ModelGeometry, max_model_len: int
) -> int:
    demand = KVDemand(
        max_model_len=max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
    )
    device = resolve_device(config.model.device)
    return find_num_blocks(layout, geometry, demand, device=device, fraction=config.kv.memory_fraction)


def _default_params(generation: GenerationDefaults) -> dict[str, Any]:
    """Return the default request parameters: the checkpoint's settings, ours where it has none."""
    try:
        SamplingParams(**generation.params)
    except InvalidRequestError as error:
        name, _, told = str(error).partition(" ")
        raise CheckpointError(f"generation_config.json: {NAMES_IN_FILE.get(name, name)} {told}") from error
    return generation.params


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
