"""Passes that rest are left out of calm steps, until one is not calm."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from sagellm.core.protocols.request_rows import RequestRows
from sagellm.core.protocols.scheduler_ir import ScheduleIR, SchedulePlan, SchedulerPassProtocol
from sagellm.core.tenant import Tenant
from sagellm.kvmgr.scheduler_ir import BaseSchedulerIR
from sagellm.kvmgr.scheduler_ir.passes import FairSharePass, ShortestFirstPass
from sagellm.kvmgr.scheduler_ir.schedule_watchers import print_changed
from sagellm.testing.schedule_states import decoding_request


@dataclass(frozen=True)
class Counting(SchedulerPassProtocol):
    """Counts its calls in its state."""

    name = "counting"
    is_restful: bool = True
    calls: list[str] = field(default_factory=list, compare=False)

    def run(self, ir: ScheduleIR) -> ScheduleIR:
        self.calls.append("run")
        return ir

    def observe(self, plan: SchedulePlan, state: Any) -> None:
        self.calls.append("observe")

    def rests(self, state: Any) -> bool:
        return self.is_restful


def step(scheduler: BaseSchedulerIR, *, pending: int = 0, running: int = 2, memory: int = 100) -> None:
    scheduler.schedule(
        pending_requests=[replace(decoding_request(f"p{i}"), num_computed_tokens=0) for i in range(pending)],
        running_requests=RequestRows.of([decoding_request(f"r{i}") for i in range(running)]),
        available_memory=memory,
    )


def of(*passes: SchedulerPassProtocol) -> BaseSchedulerIR:
    scheduler = BaseSchedulerIR()
    scheduler.set_passes(passes)
    return scheduler


def test_the_first_calm_step_is_seen_and_those_after_it_are_left_out():
    counting = Counting()
    scheduler = of(counting)
    for _ in range(3):
        step(scheduler)
    assert counting.calls == ["run", "observe"]
    assert scheduler.pipeline.is_resting


def test_a_waiting_request_a_prompt_or_few_blocks_wake_them():
    for waking in ({"pending": 1}, {"memory": 1}):
        counting = Counting()
        scheduler = of(counting)
        step(scheduler)
        step(scheduler, **waking)
        step(scheduler)
        step(scheduler)
        assert counting.calls == ["run", "observe"] * 3, waking


def test_one_that_does_not_rest_keeps_the_others_awake():
    counting = Counting()
    scheduler = of(counting, Counting(is_restful=False))
    step(scheduler)
    step(scheduler)
    assert counting.calls == ["run", "observe"] * 2


def test_a_watcher_sees_every_step():
    counting = Counting()
    scheduler = of(counting)
    scheduler.watch(print_changed())
    step(scheduler)
    step(scheduler)
    assert counting.calls == ["run", "observe"] * 2


def test_a_new_pass_is_run_at_once():
    scheduler, counting = of(ShortestFirstPass()), Counting()
    step(scheduler)
    assert scheduler.pipeline.is_resting
    scheduler.set_passes([ShortestFirstPass(), counting])
    step(scheduler)
    assert counting.calls == ["run", "observe"]


def test_fair_share_rests_with_one_tenant_and_charges_several():
    scheduler = of(FairSharePass())
    step(scheduler)
    assert scheduler.pipeline.is_resting
    of_two = [replace(decoding_request(name), tenant=Tenant(name)) for name in "ab"]
    for _ in range(2):
        scheduler.schedule(
            pending_requests=[replace(of_two[0], num_computed_tokens=0)],
            running_requests=of_two,
            available_memory=100,
        )
        scheduler.schedule(pending_requests=[], running_requests=of_two, available_memory=100)
        assert not scheduler.pipeline.is_resting
