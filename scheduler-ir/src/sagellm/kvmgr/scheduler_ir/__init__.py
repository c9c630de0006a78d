"""Continuous-batching scheduler built on an intermediate representation and passes."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.core.execution_graph import (
        ExecutionGraph as ExecutionGraph,
        GraphNode as GraphNode,
        lower_step as lower_step,
    )
    from sagellm.core.protocols.request_rows import (
        PrefixHit as PrefixHit,
        Probe as Probe,
        RequestRows as RequestRows,
        ScheduleRequest as ScheduleRequest,
    )
    from sagellm.core.protocols.scheduler_ir import (
        Admission as Admission,
        Decision as Decision,
        ScheduledRequest as ScheduledRequest,
        ScheduleIR as ScheduleIR,
        SchedulePlan as SchedulePlan,
        SchedulerIRProtocol as SchedulerIRProtocol,
        SchedulerMetrics as SchedulerMetrics,
        SchedulerPassProtocol as SchedulerPassProtocol,
    )
    from sagellm.kvmgr.scheduler_ir.base import (
        BaseSchedulerIR as BaseSchedulerIR,
    )

__version__ = "0.1.0"
_MODULE_OF = {
    "Admission": "sagellm.core",
    "BaseSchedulerIR": ".base",
    "Decision": "sagellm.core",
    "ExecutionGraph": "sagellm.core",
    "GraphNode": "sagellm.core",
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
    "lower_step": "sagellm.core",
}

__all__ = sorted(["__version__", *_MODULE_OF])

__getattr__ = lazy(__name__, _MODULE_OF)
