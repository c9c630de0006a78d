"""Optimization passes for schedulers, each a frozen dataclass whose fields are its options."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.kvmgr.scheduler_ir.passes.batching import BatchingEfficiencyPass as BatchingEfficiencyPass
    from sagellm.kvmgr.scheduler_ir.passes.chunked_prefill import ChunkedPrefillPass as ChunkedPrefillPass
    from sagellm.kvmgr.scheduler_ir.passes.deadline import DeadlinePass as DeadlinePass
    from sagellm.kvmgr.scheduler_ir.passes.fair_share import FairSharePass as FairSharePass
    from sagellm.kvmgr.scheduler_ir.passes.memory_aware import (
        MemoryAwarePreemptionPass as MemoryAwarePreemptionPass,
    )
    from sagellm.kvmgr.scheduler_ir.passes.mlfq import MLFQPass as MLFQPass
    from sagellm.kvmgr.scheduler_ir.passes.prefix_aware import PrefixCacheAwarePass as PrefixCacheAwarePass
    from sagellm.kvmgr.scheduler_ir.passes.priority import PriorityBasedPass as PriorityBasedPass
    from sagellm.kvmgr.scheduler_ir.passes.shortest import ShortestFirstPass as ShortestFirstPass
    from sagellm.kvmgr.scheduler_ir.passes.tenant_limits import AdmissionLimitPass as AdmissionLimitPass

_MODULE_OF = {
    "AdmissionLimitPass": ".tenant_limits",
    "BatchingEfficiencyPass": ".batching",
    "ChunkedPrefillPass": ".chunked_prefill",
    "DeadlinePass": ".deadline",
    "FairSharePass": ".fair_share",
    "MLFQPass": ".mlfq",
    "MemoryAwarePreemptionPass": ".memory_aware",
    "PrefixCacheAwarePass": ".prefix_aware",
    "PriorityBasedPass": ".priority",
    "ShortestFirstPass": ".shortest",
}

__all__ = sorted(_MODULE_OF)

_RENAMED = {"LifetimeAwarePass": ".lifetime"}
"""Warns when it is made."""

__getattr__ = lazy(__name__, _MODULE_OF | _RENAMED)
