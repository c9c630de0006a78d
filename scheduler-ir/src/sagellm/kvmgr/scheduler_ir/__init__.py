"""Continuous-batching scheduler built on an intermediate representation and passes."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.core.protocols.scheduler_ir import (
        Probe as Probe,
        ScheduledRequest as ScheduledRequest,
        ScheduleIR as ScheduleIR,
        SchedulePlan as SchedulePlan,
        ScheduleRequest as ScheduleRequest,
        SchedulerIRProtocol as SchedulerIRProtocol,
        SchedulerMetrics as SchedulerMetrics,
        SchedulerPassProtocol as SchedulerPassProtocol,
    )
    from sagellm.kvmgr.scheduler_ir.base import (
        BaseSchedulerIR as BaseSchedulerIR,
    )

__version__ = "0.1.0"
__all__ = [
    "BaseSchedulerIR",
    "Probe",
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
        "BaseSchedulerIR": ".base",
        "Probe": "sagellm.core",
        "ScheduleIR": "sagellm.core",
        "SchedulePlan": "sagellm.core",
        "ScheduleRequest": "sagellm.core",
        "ScheduledRequest": "sagellm.core",
        "SchedulerIRProtocol": "sagellm.core",
        "SchedulerMetrics": "sagellm.core",
        "SchedulerPassProtocol": "sagellm.core",
    },
)
