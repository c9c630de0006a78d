"""What this package offers to an engine."""

from sagellm.core import Provider, hookimpl

_PASSES = (
    ("chunked-prefill", "chunked_prefill:ChunkedPrefillPass", "keeps steps within their target time"),
    ("fair-share", "fair_share:FairSharePass", "serves tenants equally by weight"),
)


@hookimpl
def sagellm_providers() -> list[Provider]:
    """Name this package's implementations."""
    return [
        Provider(
            "scheduler",
            "base",
            "sagellm.kvmgr.scheduler_ir.base:BaseSchedulerIR",
            "continuous batching, chunked prefill, preemption by recompute",
        ),
        *(
            Provider("scheduler_pass", name, f"sagellm.kvmgr.scheduler_ir.passes.{target}", summary)
            for name, target, summary in _PASSES
        ),
    ]
