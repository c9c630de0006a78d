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

_RECOMMENDED = {
    "shortest": (
        "most loads",
        "goodput +36 % over first come, first served at 0.9 of what that carries, +6 % with closed loops",
    ),
    "fair-share": ("several tenants", "Jain's index of their shares 0.999, without it 0.990"),
    "chunked-prefill": ("all loads", "keeps steps within their target, so that others go on decoding"),
    "priority": ("urgent requests", "P99 of their wait 0.08 s on a chat trace, in order of arrival 48 s"),
}
"""Name → what our measurements recommend it for, and what they found (docs/simulation.md)."""


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
            Provider(
                "scheduler_pass",
                name,
                f"sagellm.kvmgr.scheduler_ir.passes.{target}",
                summary,
                True,
                *_RECOMMENDED.get(name, ()),
            )
            for name, target, summary in _PASSES
        ),
    ]
