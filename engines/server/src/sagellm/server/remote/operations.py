"""What can be asked of a running core, by name; each runs between two steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from sagellm.core import (
    AttentionMetrics,
    DraftProposerMetrics,
    EngineError,
    EngineMetrics,
    EngineProtocol,
    EvictionMetrics,
    ForwardMetrics,
    KVPoolMetrics,
    LifetimeMetrics,
    ModelMetrics,
    PrefixCacheMetrics,
    QuantizerMetrics,
    SchedulerMetrics,
)
from sagellm.core.protocols.grammar import StructuredOutputMetrics
from sagellm.core.protocols.sparsifier import SparsifierMetrics
from sagellm.core.step_cost import StepCostMetrics
from sagellm.engines.engine_core.batching import BatchingMetrics
from sagellm.engines.engine_core.pass_failures import PassFailures
from sagellm.engines.engine_core.policy_metrics import PolicyMetrics, ShadowMetrics
from sagellm.engines.engine_core.speculation_metrics import SpeculationMetrics
from sagellm.engines.recording.recorder import RecorderMetrics
from sagellm.engines.worker.work import WorkMetrics

_TYPES: dict[str, type[Any]] = {
    "attention_backend": AttentionMetrics,
    "batching": BatchingMetrics,
    "draft_proposer": DraftProposerMetrics,
    "eviction_policy": EvictionMetrics,
    "forward_backend": ForwardMetrics,
    "grammar": StructuredOutputMetrics,
    "kv_pool": KVPoolMetrics,
    "lifetime_predictor": LifetimeMetrics,
    "policies": PolicyMetrics,
    "shadows": ShadowMetrics,
    "model_family": ModelMetrics,
    "prefix_cache": PrefixCacheMetrics,
    "quantizer": QuantizerMetrics,
    "recorder": RecorderMetrics,
    "scheduler": SchedulerMetrics,
    "scheduler_pass": PassFailures,
    "sparsifier": SparsifierMetrics,
    "speculation": SpeculationMetrics,
    "step_cost": StepCostMetrics,
    "work": WorkMetrics,
}


def core_operations(core: EngineProtocol) -> Mapping[str, Callable[..., Any]]:
    """Return the operations of a core: name → function, with JSON-like arguments and result.

    Only our own engine has those on decisions, passes, cache, pool and saves.
    """
    from sagellm.engines.engine_core.compaction import Compactor
    from sagellm.engines.engine_core.core import EngineCore
    from sagellm.engines.engine_core.explanation import Explainer
    from sagellm.engines.engine_core.kv_admin import CacheAdmin, PoolAdmin
    from sagellm.engines.engine_core.policies import PolicyAdmin
    from sagellm.engines.recording.recorder_admin import RecorderAdmin

    common: dict[str, Callable[..., Any]] = {"metrics": core.metrics, "ping": time.monotonic_ns}
    if not isinstance(core, EngineCore):
        return common
    clock = core.parts.runtime.clock
    cache = CacheAdmin(core.kv, clock)
    pool = PoolAdmin(Compactor(core.kv, core.steps.copy_blocks, clock, core.has_unfinished))
    scheduler = core.scheduler
    recorder = RecorderAdmin(core.parts.recorder, lambda: scheduler.num_waiting + scheduler.num_running)
    policies = PolicyAdmin(core)
    return {
        **common,
        "check": core.kv.check_integrity,
        "explain": Explainer(core, policies.changes_between).explain,
        "passes": core.parts.passes.passes,
        "policies": policies.policies,
        "policy_set": policies.set,
        "policy_shadow": policies.shadow,
        "cache_why": cache.why,
        "cache_pin": cache.pin,
        "cache_pins": cache.pins,
        "cache_unpin": cache.unpin,
        "cache_unpin_all": cache.unpin_all,
        "cache_clear": cache.clear,
        "cache_evict": cache.evict,
        "cache_saves": core.parts.saves.saves,
        "cache_save": core.parts.saves.save,
        "cache_load": core.parts.saves.load,
        "cache_delete": core.parts.saves.delete,
        "cache_go_on": core.parts.saves.go_on,
        "pool_compact": pool.compact,
        "record_start": recorder.start,
        "record_stop": recorder.stop,
        "record_status": recorder.status,
    }


def read_metrics(result: Any) -> EngineMetrics:
    """Decode the result of the operation `metrics`; fields that only a plugin's metrics have are dropped.

    Raises EngineError for an invalid result.
    """
    try:
        metrics = msgspec.convert(result, EngineMetrics)
        metrics.modules = {
            kind: msgspec.convert(values, _TYPES[kind]) if kind in _TYPES else values
            for kind, values in metrics.modules.items()
        }
    except msgspec.ValidationError as error:
        raise EngineError(f"the engine's metrics cannot be read: {error}") from error
    return metrics
