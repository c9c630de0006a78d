"""What this package offers to an engine."""

from sagellm.core import Provider, hookimpl


@hookimpl
def sagellm_providers() -> list[Provider]:
    """Name this package's implementations."""
    return [
        Provider(
            "scheduler",
            "base",
            "sagellm.kvmgr.scheduler_ir.base:BaseSchedulerIR",
            "continuous batching, chunked prefill, preemption by recompute",
        )
    ]
