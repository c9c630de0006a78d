"""Continuous-batching scheduler built on an intermediate representation and passes."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.core.protocols.scheduler_ir import (
        Admission as Admission,
        ScheduledRequest as ScheduledRequest,
        ScheduleIR as ScheduleIR,
        SchedulePlan as SchedulePlan,
        SchedulerIRProtocol as SchedulerIRProtocol,
        SchedulerMetrics as SchedulerMetrics,
        SchedulerPassProtocol as SchedulerPassProtocol,
    )
    from sagellm.core.protocols.scheduler_rows import (
        Decision as Decision,
        PrefixHit as PrefixHit,
        Probe as Probe,
        RequestRows as RequestRows,
        ScheduleRequest as ScheduleRequest,
    )
    from sagellm.kvmgr.scheduler_ir.base import (
        BaseSchedulerIR as BaseSchedulerIR,
    )

__version__ = "0.1.0"
__all__ = [
    "Admission",
    "BaseSchedulerIR",
    "Decision",
    "PrefixHit",
    "Probe",
    "RequestRows",
    "ScheduleIR",
    "SchedulePlan",
    "ScheduleRequest",
    "ScheduledRequest",
    "SchedulerIRProtocol",
    "SchedulerMetrics",
    "SchedulerPassProtocol",
    "__version__",
]

__getattr__ = lazy(
    __name__,
    {
        "Admission": "sagellm.core",
        "BaseSchedulerIR": ".base",
        "Decision": "sagellm.core",
        "PrefixHit": "sagellm.core",
        "Probe": "sagellm.core",
        "RequestRows": "sagellm.core",
        "ScheduleIR": "sagellm.core",
        "SchedulePlan": "sagellm.core",
        "ScheduleRequest": "sagellm.core",
        "ScheduledRequest": "sagellm.core",
        "SchedulerIRProtocol": "sagellm.core",
        "SchedulerMetrics": "sagellm.core",
        "SchedulerPassProtocol": "sagellm.core",
    },
)
