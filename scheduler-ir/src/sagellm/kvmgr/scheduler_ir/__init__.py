"""Continuous-batching scheduler built on an intermediate representation and passes."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
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
    from sagellm.kvmgr.scheduler_ir.schedule_text import (
        schedule_from_text as schedule_from_text,
        schedule_to_text as schedule_to_text,
    )
    from sagellm.kvmgr.scheduler_ir.schedule_verifier import (
        verify_rewrite as verify_rewrite,
    )
    from sagellm.kvmgr.scheduler_ir.schedule_watchers import (
        emit_ir as emit_ir,
        print_changed as print_changed,
    )

__version__ = "0.2.0"
_MODULE_OF = {
    "Admission": "sagellm.core.protocols.scheduler_ir",
    "BaseSchedulerIR": ".base",
    "Decision": "sagellm.core",
    "PrefixHit": "sagellm.core",
    "Probe": "sagellm.core",
    "RequestRows": "sagellm.core",
    "ScheduleIR": "sagellm.core",
    "SchedulePlan": "sagellm.core",
    "ScheduleRequest": "sagellm.core",
    "ScheduledRequest": "sagellm.core.protocols.scheduler_ir",
    "SchedulerIRProtocol": "sagellm.core",
    "SchedulerMetrics": "sagellm.core",
    "SchedulerPassProtocol": "sagellm.core",
    "emit_ir": ".schedule_watchers",
    "print_changed": ".schedule_watchers",
    "schedule_from_text": ".schedule_text",
    "schedule_to_text": ".schedule_text",
    "verify_rewrite": ".schedule_verifier",
}

__all__ = sorted(["__version__", *_MODULE_OF])

_MOVED = dict.fromkeys(("ExecutionGraph", "GraphNode", "lower_step"), "sagellm.core")
"""Names of the engine now; core says where, and warns."""

__getattr__ = lazy(__name__, _MODULE_OF | _MOVED)
