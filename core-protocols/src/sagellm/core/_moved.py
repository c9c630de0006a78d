"""Old import paths of what moved in 0.2: they work until 0.3, and warn."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MOVED = {
    "sagellm.core.conformance": "sagellm.testing.conformance",
    "sagellm.core.execution_graph": "sagellm.engines.worker.execution_graph",
    "sagellm.core.graph_text": "sagellm.engines.worker.graph_text",
    "sagellm.core.metrics": "sagellm.engines.metrics",
    "sagellm.core.schedule_text": "sagellm.kvmgr.scheduler_ir.schedule_text",
    "sagellm.core.schedule_verifier": "sagellm.kvmgr.scheduler_ir.schedule_verifier",
    "sagellm.core.schedule_watchers": "sagellm.kvmgr.scheduler_ir.schedule_watchers",
    "sagellm.core.testing": "sagellm.testing",
    "sagellm.core.tracing": "sagellm.engines.tracing",
    "sagellm.engines.bench": "sagellm.lab.bench",
    "sagellm.engines.cli.figures": "sagellm.server.cli.figures",
    "sagellm.engines.cli.variadic": "sagellm.lab.cli.variadic",
    "sagellm.engines.http": "sagellm.server.http",
    "sagellm.engines.input_processor": "sagellm.engines.requests.input_processor",
    "sagellm.engines.output_processor": "sagellm.engines.requests.output_processor",
    "sagellm.engines.output_stream": "sagellm.engines.requests.output_stream",
    "sagellm.engines.layers.linear": "sagellm.accel.linear",
    "sagellm.engines.loading.weights": "sagellm.accel.weights",
    "sagellm.engines.outputs": "sagellm.engines.requests.outputs",
    "sagellm.engines.plots": "sagellm.lab.plots",
    "sagellm.engines.prompts": "sagellm.engines.requests.prompts",
    "sagellm.engines.queued_request": "sagellm.engines.requests.queued_request",
    "sagellm.engines.remote": "sagellm.server.remote",
    "sagellm.engines.request_checks": "sagellm.engines.requests.request_checks",
    "sagellm.engines.request_driver": "sagellm.engines.requests.request_driver",
    "sagellm.engines.serve": "sagellm.server.serve",
    "sagellm.engines.simulation": "sagellm.lab.simulation",
    "sagellm.engines.text.process": "sagellm.server.text_process",
    "sagellm.engines.traces": "sagellm.lab.traces",
    "sagellm.lab.traces.files": "sagellm.lab.files",
    "sagellm.engines.worker.overlapped_executor": "sagellm.engines.worker.inline_executor",
}

_MOVED_NAMES = {
    "sagellm.core.lifetime_scores": "LifetimeScores predicted_length",
    "sagellm.core.namespace": "PUBLIC",
    "sagellm.core.plugins.options": "ChosenProvider ProviderOption",
    "sagellm.core.plugins.provider": "Kind",
    "sagellm.core.plugins.registry": "InstalledCommand InstalledPlugin InstalledProvider",
    "sagellm.core.protocols.attention": "NullAttentionBackend",
    "sagellm.core.protocols.checkpoint_format": "NullCheckpointFormat",
    "sagellm.core.protocols.engine": """
        EngineInfo EngineSequence NullEngine PromptScore PromptScores RequestLimits STEP_TOKEN_BOUNDS
        SampledToken
    """,
    "sagellm.core.protocols.eviction": "NullEvictionPolicy",
    "sagellm.core.protocols.executor": "NullExecutor",
    "sagellm.core.protocols.forward": "NullForwardBackend",
    "sagellm.core.protocols.kv_allocator": "NullKVAllocator",
    "sagellm.core.protocols.kv_offload": "Fetch FetchRule KVAccess NullKVOffload OffloadMetrics",
    "sagellm.core.protocols.kv_pool": "NullKVPool",
    "sagellm.core.protocols.kv_saves": "NullKVSaves SavePhase",
    "sagellm.core.protocols.kv_tier": "NullKVTier TierAction",
    "sagellm.core.protocols.lifetime": "NullLifetimePredictor check_observation",
    "sagellm.core.protocols.logits_processor": "NullLogitsProcessor",
    "sagellm.core.protocols.model_family": "NullModelFamily",
    "sagellm.core.protocols.model_spec": "TRANSFORMERS_CLASS",
    "sagellm.core.protocols.prefix_cache": """
        CachedRun MissExplanation NullPrefixCache PartialMatch PinResult PinnedPrefix
    """,
    "sagellm.core.protocols.quantizer": "NullQuantizer",
    "sagellm.core.protocols.scheduler_ir": """
        Admission NullSchedulerIR NullSchedulerPass PassWatcher ScheduledRequest
    """,
    "sagellm.core.protocols.step": """
        BlockUpdates CopyBlocks KVOp ReadBlocks Runs Scored Seat SeatArrival WriteBlocks verify_output
    """,
    "sagellm.core.protocols.topology": "CPU Cache GPU Link NetworkInterface NullTopology NumaNode",
    "sagellm.core.protocols.trace": "NullTraceReader",
    "sagellm.core.random_access": "MemoryRandomAccessFile RandomAccessFile SystemRandomAccessFile",
    "sagellm.core.request": "RequestRecord StepRecord",
    "sagellm.core.runtime": "Files MemoryFiles SystemFiles",
    "sagellm.core.step_cost": "StepCostMetrics",
    "sagellm.core.tenant": "hash_of",
    "sagellm.engines.engine_core.sequence": "RequestStatus",
    "sagellm.engines.metrics.cache": """
        PromptBlocks block_sharing_fraction external_fragmentation gap_closed internal_fragmentation
        mean_block_sharing_fraction memory_use_gain re_prefill_rate sharing_fraction_source
        token_hit_rate token_saving utilisation
    """,
    "sagellm.engines.metrics.fairness": "BatchStep batching_efficiency jains_index",
    "sagellm.engines.metrics.flops": """
        attention_flops decode_flops layer_flops logits_flops mlp_flops prefill_flops projection_flops
    """,
    "sagellm.engines.metrics.latency": """
        RequestTimes goodput itl_s percentile throughput total_throughput
        tpot_s ttft_s
    """,
    "sagellm.engines.metrics.roofline": "MFUResult bandwidth_use roofline_ratio",
    "sagellm.engines.tracing": "ChromeTraceWriter NullTrace TraceValue TraceWriter",
    "sagellm.engines.worker.execution_graph": """
        ExecutionGraph FORWARD_KINDS GraphNode NodeKind lower_step
    """,
    "sagellm.engines.worker.graph_text": "GraphShapes",
    "sagellm.kvmgr.scheduler_ir.schedule_text": "schedule_from_text schedule_to_text",
    "sagellm.kvmgr.scheduler_ir.schedule_verifier": "verify_rewrite",
    "sagellm.kvmgr.scheduler_ir.schedule_watchers": "PASS_WATCHERS emit_ir print_changed",
}
"""What `sagellm.core` itself had before 0.2, by the module that has it now."""


class _Alias:
    """A loader that gives a module under its old name, as it is."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Undo what the import system has just written to it."""
        module.__spec__ = self._spec


class _MovedModules:
    """A finder of modules under their old names. Asked first: where a package is known by its
    old name, its modules would be found, and run again, under theirs.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Import the module from where it is now. Raises ImportError if its distribution is missing."""
        if not fullname.startswith("sagellm."):
            return None
        old = fullname
        while old and old not in _MOVED:
            old = old.rpartition(".")[0]
        if not old:
            return None
        new = _MOVED[old] + fullname.removeprefix(old)
        try:
            module = import_module(new)
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(_missing(fullname, new, error), name=fullname) from error
        warnings.warn(
            f"{fullname} is {new} now; the old name goes with 0.3", DeprecationWarning, stacklevel=2
        )
        alias: Any = _Alias(module)  # deriving from importlib.abc's Loader would take 12 ms to import it
        return ModuleSpec(fullname, alias, is_package=hasattr(module, "__path__"))


def find_moved_modules() -> None:
    """Let old names be imported, from now on."""
    if not any(isinstance(finder, _MovedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, _MovedModules())


def with_moved_names(
    package: str, own: Callable[[str], object], moved: Mapping[str, str] = _MOVED_NAMES
) -> Callable[[str], object]:
    """Return a module's `__getattr__` that also knows the names that moved, and warns of each use."""
    module_of = {name: module for module, names in moved.items() for name in names.split()}

    def __getattr__(name: str) -> object:
        module = module_of.get(name)
        if module is None:
            return own(name)
        told = f"{package}.{name} is {module}.{name} now; the old name goes with 0.3"
        warnings.warn(told, DeprecationWarning, stacklevel=2)
        try:
            return getattr(import_module(module), name)
        except ModuleNotFoundError as error:
            raise AttributeError(_missing(f"{package}.{name}", module, error)) from error

    return __getattr__


def _missing(old: str, new: str, error: ModuleNotFoundError) -> str:
    """Say where something is now, and which distribution brings it."""
    parts = new.split(".")
    distribution = f"sagellm-{parts[2 if parts[1] == 'kvmgr' else 1].replace('_', '-')}"
    return f"{old} is {new} now, which cannot be imported ({error}); pip install {distribution}"
