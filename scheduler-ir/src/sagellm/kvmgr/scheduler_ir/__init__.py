"""Continuous-batching scheduler built on an intermediate representation and passes."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.core.protocols.scheduler_ir import (
        Probe as Probe,
    )
    from sagellm.core.protocols.scheduler_ir import (
        ScheduledRequest as ScheduledRequest,
    )
    from sagellm.core.protocols.scheduler_ir import (
        ScheduleIR as ScheduleIR,
    )
    from sagellm.core.protocols.scheduler_ir import (
        SchedulePlan as SchedulePlan,
    )
    from sagellm.core.protocols.scheduler_ir import (
        ScheduleRequest as ScheduleRequest,
    )
    from sagellm.core.protocols.scheduler_ir import (
        SchedulerIRProtocol as SchedulerIRProtocol,
    )
    from sagellm.core.protocols.scheduler_ir import (
        SchedulerMetrics as SchedulerMetrics,
    )
    from sagellm.core.protocols.scheduler_ir import (
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
