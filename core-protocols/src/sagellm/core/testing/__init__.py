"""The conformance kit: one contract class a protocol, which built-ins and third parties both subclass.

    from sagellm.core.testing import EvictionPolicyContract

    class TestMine(EvictionPolicyContract):
        def make(self):
            return MyPolicy()

Needs the extra `testing` of core (pytest and hypothesis).
"""

from typing import TYPE_CHECKING

import pytest

from sagellm.core._lazy import lazy

if TYPE_CHECKING:
    from sagellm.core.testing.schedule_simulation import (
        ScheduleSimulation as ScheduleSimulation,
    )
    from sagellm.core.testing.scheduler import (
        SchedulerContract as SchedulerContract,
    )
    from sagellm.core.testing.scheduler import (
        SchedulerPlanContract as SchedulerPlanContract,
    )
    from sagellm.core.testing.scheduler_pass import (
        SchedulerPassContract as SchedulerPassContract,
    )

_TABLE = {
    "ScheduleSimulation": ".schedule_simulation",
    "SchedulerContract": ".scheduler",
    "SchedulerPassContract": ".scheduler_pass",
    "SchedulerPlanContract": ".scheduler",
}

__all__ = [
    "ScheduleSimulation",
    "SchedulerContract",
    "SchedulerPassContract",
    "SchedulerPlanContract",
]

# A failing `assert` of the kit then shows its values, as one in a test file does.
pytest.register_assert_rewrite(*(f"{__name__}{module}" for module in sorted(set(_TABLE.values()))))

__getattr__ = lazy(__name__, _TABLE)
