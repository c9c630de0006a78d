"""Passes that rest are left out of calm steps, until one is not calm."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

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


NOBODY, SOMEBODY = (
    RequestRows.of([replace(decoding_request(f"p{i}"), num_computed_tokens=0) for i in range(number)])
    for number in (0, 1)
)
RUNNING = RequestRows.of([decoding_request("r0"), decoding_request("r1")])


def step(scheduler: BaseSchedulerIR, pending: RequestRows = NOBODY, memory: int = 100) -> None:
    scheduler.schedule(pending_requests=pending, running_requests=RUNNING, available_memory=memory)


def of(*passes: SchedulerPassProtocol, max_num_seqs: int = 8) -> BaseSchedulerIR:
    scheduler = BaseSchedulerIR(max_num_seqs=max_num_seqs)
    scheduler.set_passes(passes)
    return scheduler


def test_the_first_calm_step_is_seen_and_those_after_it_are_left_out():
    counting = Counting()
    scheduler = of(counting)
    for _ in range(3):
        step(scheduler)
    assert counting.calls == ["run", "observe"]
    assert scheduler.pipeline.is_resting


def test_a_waiting_request_that_can_be_admitted_or_few_blocks_wake_them():
    for waking in ({"pending": SOMEBODY}, {"memory": 1}):
        counting = Counting()
        scheduler = of(counting)
        step(scheduler)
        step(scheduler, **waking)
        step(scheduler)
        step(scheduler)
        assert counting.calls == ["run", "observe"] * 3, waking


def test_while_all_seats_are_taken_they_wake_when_others_wait():
    counting = Counting()
    scheduler = of(counting, max_num_seqs=2)
    for _ in range(3):
        step(scheduler, SOMEBODY)
    assert counting.calls == ["run", "observe"]
    step(scheduler, RequestRows.of([*SOMEBODY]))
    assert counting.calls == ["run", "observe"] * 2


def test_a_rate_that_is_measured_while_requests_wait_does_not_depend_on_the_steps():
    optimization_pass = ShortestFirstPass()
    busy = []
    for times in ([20.0], [float(second) for second in range(1, 21)]):
        queue = optimization_pass.start()
        queue.is_busy = True
        for now in times:
            queue.advance(now)
        busy.append((queue.admitted_s, queue.busy_s))
    assert busy[0] == pytest.approx(busy[1])


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
