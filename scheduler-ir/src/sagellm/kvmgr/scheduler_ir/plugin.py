"""What this package offers to an engine."""

from sagellm.core import Provider, hookimpl

_PASSES = (
    ("batching", "batching:BatchingEfficiencyPass", "fills each step's tokens and blocks by best fit"),
    ("chunked-prefill", "chunked_prefill:ChunkedPrefillPass", "keeps steps within their target time"),
    ("deadline", "deadline:DeadlinePass", "serves first what is due first"),
    ("fair-share", "fair_share:FairSharePass", "serves tenants equally by weight"),
    ("lifetime", "lifetime:LifetimeAwarePass", "the old name of shortest"),
    ("memory-aware", "memory_aware:MemoryAwarePreemptionPass", "preempts what costs least to compute again"),
    ("mlfq", "mlfq:MLFQPass", "serves first what has been served least, without predictions"),
    ("prefix-aware", "prefix_aware:PrefixCacheAwarePass", "admits first what is cached"),
    ("priority", "priority:PriorityBasedPass", "serves by priority, which waiting raises"),
    ("shortest", "shortest:ShortestFirstPass", "serves first what takes the least time"),
    ("tenant-limits", "tenant_limits:AdmissionLimitPass", "limits what one tenant runs at a time"),
)


@hookimpl
def sagellm_providers() -> list[Provider]:
    """Name this package's implementations."""
    return [
        Provider(
            "scheduler",
            "base",
            "sagellm.kvmgr.scheduler_ir.base:BaseSchedulerIR",
            "continuous batching, chunked prefill, preemption",
        ),
        *(
            Provider("scheduler_pass", name, f"sagellm.kvmgr.scheduler_ir.passes.{target}", summary)
            for name, target, summary in _PASSES
        ),
    ]
