"""The conformance kit on the scheduler called `base`."""

from __future__ import annotations

from typing import Any

import pytest

from sagellm.core.testing.schedule_simulation import ScheduleSimulation
from sagellm.core.testing.scheduler import SchedulerContract
from sagellm.kvmgr.scheduler_ir import BaseSchedulerIR


class TestBaseSchedulerIR(SchedulerContract):
    def make(self, **options: Any) -> BaseSchedulerIR:
        return BaseSchedulerIR(**options)


@pytest.mark.full
@pytest.mark.parametrize("part", range(10))
def test_every_request_ends_under_a_thousand_random_loads(part: int) -> None:
    for seed in range(100 + part, 1100, 10):
        ScheduleSimulation(BaseSchedulerIR, seed).run()


def test_the_random_loads_preempt_and_meet_failed_allocations() -> None:
    simulations = [ScheduleSimulation(BaseSchedulerIR, seed) for seed in range(100)]
    for simulation in simulations:
        simulation.run()
    assert sum(simulation.num_steps for simulation in simulations) > 10_000
    assert sum(simulation.num_preempted for simulation in simulations) > 100
    assert sum(simulation.num_dropped_plans for simulation in simulations) > 0
