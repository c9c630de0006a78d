"""The intermediate representation as text, and what passes may and may not decide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, fields, replace
from random import Random
from typing import Any

import numpy as np
import pytest

from sagellm.core import EngineError, PluginRegistry, TokenIds, VirtualClock
from sagellm.core.ids import RequestId
from sagellm.kvmgr.scheduler_ir import (
    BaseSchedulerIR,
    PrefixHit,
    RequestRows,
    ScheduleIR,
    SchedulePlan,
    ScheduleRequest,
    SchedulerPassProtocol,
)
from sagellm.kvmgr.scheduler_ir.schedule_text import schedule_to_text
from sagellm.testing.schedule_simulation import ScheduleSimulation
from sagellm.testing.schedule_states import make_ir
from sagellm.testing.scheduler import FAULTS, TWO_OF_EACH
from sagellm.testing.scheduler_pass import SchedulerPassContract

GIVEN = """\
step 0 at 3.500 s: available=7 tokens=64 seats=4 block=16
  running 2 urgent tokens=33 computed=32 hit=0 priority=2 max=8 blocks=2 arrived=9
  running 1 old tokens=33 computed=32 hit=0 priority=0 max=8 blocks=2 arrived=1
  running 0 new tokens=33 computed=32 hit=0 priority=0 max=8 blocks=2 arrived=5
  pending 0 short tokens=3 computed=0 hit=0 priority=0 max=8
  pending 1 long tokens=40 computed=0 hit=16 priority=1 max=8"""

DECIDED = """\
step 0 at 3.500 s: available=7 tokens=32 seats=4 block=16
  running 0 new tokens=33 computed=32 hit=0 priority=0 max=8 blocks=2 arrived=5
  running 1 old tokens=33 computed=32 hit=0 priority=0 max=8 blocks=2 arrived=1
  running 2 urgent tokens=33 computed=32 hit=0 priority=2 max=8 blocks=2 arrived=9
  pending 1 long tokens=40 computed=0 hit=16 priority=1 max=8
  pending 0 short tokens=3 computed=0 hit=0 priority=0 max=8
  number 0: order pending 1 0
  number 0: cap pending 1 = 8
  number 0: cap running 0-1 = 8
  number 1: defer pending 0 = too short
  number 1: preempt running 2 = recompute
  number 1: order running 0-2
  number 1: lower max_num_batched_tokens = 32"""


@dataclass(frozen=True)
class Rewrite(SchedulerPassProtocol):
    """Does what a test asks for."""

    change: Callable[[ScheduleIR], Any]
    title: str = "rewrite"

    @property
    def name(self) -> str:
        return self.title

    def run(self, ir: ScheduleIR) -> ScheduleIR:
        result: ScheduleIR = self.change(ir)
        return result


@dataclass(frozen=True)
class CachedFirst(SchedulerPassProtocol):
    """Admits first what the prefix cache has most of; `ageing_s` of waiting count as much as a whole hit."""

    ageing_s: float = 10.0

    @property
    def name(self) -> str:
        return "cached_first"

    def run(self, ir: ScheduleIR) -> ScheduleIR:
        cached = np.array([hit.num_tokens for hit in ir.hits(range(len(ir.pending)))]) / ir.pending.num_tokens
        waited = (ir.now - ir.pending.arrived_time) / self.ageing_s
        return ir.order_pending(np.argsort(-(cached + waited), kind="stable"))


@dataclass(frozen=True)
class Restless(SchedulerPassProtocol):
    """Decides all kinds of things at random, but defers or preempts a request 3 times at most."""

    seed: int

    @property
    def name(self) -> str:
        return "restless"

    def start(self) -> tuple[Random, dict[str, int]]:
        return Random(self.seed), {}

    def run(self, ir: ScheduleIR) -> ScheduleIR:
        rng, counts = ir.state

        def some(rows: Any) -> list[int]:
            names = [each.request_id for each in rows]
            chosen = [row for row, name in enumerate(names) if rng.random() < 0.2 and counts.get(name, 0) < 3]
            counts.update({names[row]: counts.get(names[row], 0) + 1 for row in chosen})
            return chosen

        order = rng.sample(range(len(ir.pending)), len(ir.pending)) if rng.random() < 0.05 else ir.admission
        ir = ir.order_pending(order).defer(some(ir.pending), "restless").preempt(some(ir.running), "swap")
        return ir.cap(rng.randint(1, 30), running=range(len(ir.running)), pending=range(len(ir.pending)))


class TestCachedFirst(SchedulerPassContract):
    def make(self) -> SchedulerPassProtocol:
        return CachedFirst()


class TestRestless(SchedulerPassContract):
    def make(self) -> SchedulerPassProtocol:
        return Restless(1)


def request(name: str, num_tokens: int, **values: Any) -> ScheduleRequest:
    return ScheduleRequest(RequestId(name), TokenIds(bytes(4 * num_tokens)), 8, **values)


def running(name: str, **values: Any) -> ScheduleRequest:
    return request(name, 33, num_computed_tokens=32, num_blocks=2, **values)


def state() -> dict[str, Any]:
    return {
        "running_requests": [
            running("new", arrived_time=5.0),
            running("old", arrived_time=1.0),
            running("urgent", arrived_time=9.0, priority=2),
        ],
        "pending_requests": [request("short", 3), request("long", 40, priority=1, prefix_cache_hit=16)],
        "available_memory": 7,
    }


def scheduler(*changes: Callable[[ScheduleIR], Any], **options: Any) -> BaseSchedulerIR:
    clock = VirtualClock(start_ns=3_500_000_000)
    made = BaseSchedulerIR(max_num_batched_tokens=64, max_num_seqs=4, clock=clock, **options)
    for number, change in enumerate(changes):
        made.add_optimization_pass(Rewrite(change, f"number {number}"))
    return made


def ids(plan_part: Any) -> list[str]:
    return [entry.request_id for entry in plan_part]


def decide_orders_and_caps(ir: ScheduleIR) -> ScheduleIR:
    return ir.order_pending([1, 0]).cap(8, pending=[1], running=ir.running.priority == 0)


def decide_the_rest(ir: ScheduleIR) -> ScheduleIR:
    ir = ir.defer(ir.pending.num_tokens < 9, "too short").preempt([2]).order_running(range(3))
    return ir.lower(max_num_batched_tokens=32)


def test_a_pass_sees_rows_in_their_orders_and_the_time() -> None:
    texts: list[str] = []

    def look(ir: ScheduleIR) -> ScheduleIR:
        texts.append(schedule_to_text(ir))
        return ir

    scheduler(look, decide_orders_and_caps, decide_the_rest, look).schedule(**state())
    assert texts == [GIVEN, DECIDED.replace("number 1", "number 2").replace("number 0", "number 1")]


def test_the_plan_follows_the_decisions_and_logs_them() -> None:
    plan = scheduler(decide_orders_and_caps, decide_the_rest).schedule(**state())
    assert ids(plan.preempted_requests) == ["urgent"]
    work = [(each.request_id, each.num_tokens) for each in plan.scheduled_requests]
    assert work == [("new", 1), ("old", 1), ("long", 8)]
    assert (plan.num_deferred, plan.deferred_reason) == (1, "pass")
    assert [f"  {decision}" for decision in plan.decisions] == DECIDED.splitlines()[6:]
    assert scheduler().schedule(**state()).decisions == ()


def test_passes_run_in_the_order_they_were_added() -> None:
    seen: list[list[int]] = []

    def swap(ir: ScheduleIR) -> ScheduleIR:
        seen.append(ir.admission.tolist())
        return ir.order_pending(ir.admission[::-1])

    plan = scheduler(swap, swap, swap).schedule(**state())
    assert seen == [[0, 1], [1, 0], [0, 1]]
    assert ids(plan.scheduled_requests)[-1:] == ["long"]


def test_a_pass_decides_the_order_of_admission() -> None:
    plan = scheduler(lambda ir: ir.order_pending([1, 0])).schedule(**state())
    assert (ids(plan.scheduled_requests), plan.deferred_reason) == (["new", "old", "urgent", "long"], "seats")


def test_a_pass_decides_who_is_preempted_for_lack_of_blocks() -> None:
    given = state() | {"available_memory": 0}
    assert ids(scheduler().schedule(**given).preempted_requests) == ["new"]
    other = scheduler(lambda ir: ir.order_running([0, 1, 2]))
    assert ids(other.schedule(**given).preempted_requests) == ["urgent"]


def test_preemption_by_a_pass_makes_room_for_an_admission_in_the_same_step() -> None:
    given = state() | {"available_memory": 2}
    plan = scheduler(lambda ir: ir.preempt([0, 1]).defer([0], "small")).schedule(**given)
    assert (ids(plan.preempted_requests), ids(plan.scheduled_requests)) == (
        ["new", "old"],
        ["urgent", "long"],
    )


def test_of_several_caps_the_smallest_holds() -> None:
    plan = scheduler(lambda ir: ir.cap(3, pending=[1]), lambda ir: ir.cap(5, pending=[0, 1])).schedule(
        **state() | {"running_requests": []}
    )
    assert [entry.num_tokens for entry in plan.admitted] == [3, 3]


def test_a_pass_sees_hits_before_it_orders() -> None:
    def probe(row: ScheduleRequest) -> PrefixHit:
        return PrefixHit({"short": 0, "long": 32}[row.request_id], 1)

    made = scheduler(probe=probe)
    made.add_optimization_pass(CachedFirst())
    plan = made.schedule(**state())
    assert [(entry.row, entry.hit) for entry in plan.admitted] == [(1, 32)]


def test_a_pass_may_lower_the_limits_of_a_step() -> None:
    plan = scheduler(lambda ir: ir.lower(max_num_batched_tokens=3)).schedule(**state())
    assert (plan.num_scheduled_tokens, plan.deferred_reason) == (3, "tokens")
    plan = scheduler(lambda ir: ir.lower(max_num_seqs=3)).schedule(**state())
    assert plan.deferred_reason == "seats"


def test_a_row_cannot_be_written_to() -> None:
    ir = make_ir(TWO_OF_EACH)
    with pytest.raises(FrozenInstanceError):
        ir.pending[0].priority = 1  # type: ignore[misc]
    with pytest.raises(AttributeError):
        ir.pending.priority = ir.pending.num_tokens  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        ir.pending.priority[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        ir.admission[0] = 1
    kept = [1, 2, 3]
    row = ScheduleRequest("a", kept, 8)
    kept.append(4)
    assert row.token_ids == [1, 2, 3]


@pytest.mark.parametrize("part", ["deferred", "preempted"])
def test_a_pass_cannot_write_to_what_others_decided(part: str) -> None:
    def write(ir: ScheduleIR) -> ScheduleIR:
        getattr(ir, part)[0] = "recompute"
        return ir

    with pytest.raises(EngineError, match="'number 1' failed: TypeError"):
        scheduler(decide_orders_and_caps, write).schedule(**state())


@dataclass(frozen=True)
class Meddler(SchedulerPassProtocol):
    """Changes the plan that it is shown."""

    change: Callable[[SchedulePlan], Any]
    name = "meddler"

    def run(self, ir: ScheduleIR) -> ScheduleIR:
        return ir.preempt([0])

    def observe(self, plan: SchedulePlan, state: Any) -> None:
        self.change(plan)


MEDDLING: dict[str, Callable[[Any], Any]] = {
    "rows": lambda plan: plan.rows.fill(0),
    "num_tokens": lambda plan: plan.num_tokens.fill(9),
    "num_new_blocks": lambda plan: plan.num_new_blocks.fill(0),
    "admitted": lambda plan: plan.admitted.append(plan.admitted[0]),
    "preempted": lambda plan: plan.preempted.append(1),
    "preempted_for": lambda plan: plan.preempted_for.pop(),
    "swapped": lambda plan: plan.swapped.append(0),
}


@pytest.mark.parametrize("part", MEDDLING)
@pytest.mark.parametrize("available_memory", [0, 9])
def test_a_plan_is_not_changed_by_a_pass_that_observes_it(part: str, available_memory: int) -> None:
    made = scheduler()
    made.add_optimization_pass(Meddler(MEDDLING[part]))
    with pytest.raises(EngineError, match=r"'meddler' failed: .*(read-only|'tuple' object)"):
        made.schedule(**{**state(), "available_memory": available_memory})


ORDER, GIVEN_ROWS, ONCE, NOTHING_ELSE, LOWER, CAP = (
    "an order keeps all rows",
    "rows are those that were given",
    "a row is named once",
    "a pass changes nothing but decisions",
    "limits only go down",
    "a cap is a number of tokens",
)
RULES = {
    "loses a waiting request": ORDER,
    "loses a running request": ORDER,
    "doubles a waiting request": ONCE,
    "doubles a running request": ONCE,
    "invents a waiting request": GIVEN_ROWS,
    "invents a running request": GIVEN_ROWS,
    "replaces the waiting requests": NOTHING_ELSE,
    "replaces the running requests": NOTHING_ELSE,
    "names rows by fractions": "rows are positions",
    "raises the budget": LOWER,
    "raises the seats": LOWER,
    "raises the memory": LOWER,
    "sets a limit below 0": LOWER,
    "sets a limit behind the log": NOTHING_ELSE,
    "changes the block size": NOTHING_ELSE,
    "changes the time": NOTHING_ELSE,
    "caps a waiting request at 0": CAP,
    "caps below 0": CAP,
    "caps above what a count can be": CAP,
    "lets a waiting request yield": "yield is for running",
    "caps by a fraction": CAP,
    "defers an unknown request": GIVEN_ROWS,
    "defers a request twice": ONCE,
    "defers without a reason": "a deferral has a reason",
    "defers a running request": "defer is for pending",
    "preempts an unknown request": GIVEN_ROWS,
    "preempts a waiting request": "preempt is for running",
    "preempts in an unknown way": "preemption is by recompute or swap",
    "swaps an unknown request": GIVEN_ROWS,
    "swaps a request twice": ONCE,
    "swaps a waiting request": "swap is for running",
    "swaps for a reason": "a swap has no value",
    "changes the epoch": NOTHING_ELSE,
    "masks other rows": "InvalidInputError: a mask over the pending rows has 1 values; it must have 2",
    "decides something unknown": "a decision is of a known kind",
    "decides by a list": "rows are positions",
    "replaces its state": NOTHING_ELSE,
    "does not decide by a tuple": "decisions are a tuple",
    "decides something that is not a word": "a decision is of a known kind",
    "decides by a string": "a decision is a Decision",
    "writes to a row": "FrozenInstanceError",
    "writes to a column": "ValueError: assignment destination is read-only",
    "writes to the rows": "AttributeError",
    "writes to the prompt": "AttributeError",
    "writes to the schedule": "FrozenInstanceError",
    "writes to a decision": "ValueError: assignment destination is read-only",
    "returns nothing": "a pass returns a ScheduleIR",
    "raises": "ZeroDivisionError",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_pass_is_rejected_with_its_name_and_the_rule(fault: str) -> None:
    with pytest.raises(EngineError) as caught:
        BaseSchedulerIR().apply_pass(Rewrite(FAULTS[fault], "faulty"), make_ir(TWO_OF_EACH))
    assert str(caught.value).startswith("scheduler pass 'faulty' ")
    assert RULES[fault] in str(caught.value)


@pytest.mark.parametrize(
    "fault", [lambda ir: replace(ir, decisions=()), lambda ir: replace(ir, decisions=ir.decisions[::-1])]
)
def test_a_pass_that_drops_what_an_earlier_one_decided_is_named(fault: Callable[[ScheduleIR], Any]) -> None:
    with pytest.raises(EngineError, match="'number 1' broke the rule 'what earlier passes decided stands'"):
        scheduler(decide_orders_and_caps, fault).schedule(**state())


class Bribed(ScheduleIR):
    """Says other caps than those that were decided."""

    def caps(self, part: Any) -> Any:
        return np.zeros(len(getattr(self, part)), np.int32)


def test_nothing_but_the_decisions_of_a_pass_is_taken_over() -> None:
    def bribe(ir: ScheduleIR) -> ScheduleIR:
        bribed = Bribed(**{each.name: getattr(ir, each.name) for each in fields(ir)})
        return bribed.order_pending([1, 0]).lower(max_num_seqs=3)

    ir = BaseSchedulerIR().apply_pass(Rewrite(bribe, "bribed"), make_ir(TWO_OF_EACH))
    assert type(ir) is ScheduleIR
    assert (ir.admission.tolist(), ir.max_num_seqs, ir.caps("pending").min()) == ([1, 0], 3, 2**31 - 1)


def test_the_lowest_priority_of_all_is_preempted_first() -> None:
    rows = [running("low", priority=-(2**31)), running("high", priority=2**31 - 1), running("middle")]
    assert RequestRows.of(rows).by_rank().tolist() == [1, 2, 0]


def test_a_pass_that_raises_a_limit_is_told_what_is_possible() -> None:
    with pytest.raises(EngineError, match=r"it set lower max_num_seqs to 9; possible is 0 … 4"):
        scheduler(lambda ir: ir.lower(max_num_seqs=9)).schedule(**state())


def test_a_pass_that_raises_is_named_and_the_cause_is_chained() -> None:
    with pytest.raises(EngineError, match="'number 0' failed: ZeroDivisionError") as caught:
        scheduler(lambda ir: 1 // 0).schedule(**state())
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("seed", range(10))
def test_every_request_ends_beside_passes_that_defer_cap_and_preempt(seed: int) -> None:
    simulation = ScheduleSimulation(BaseSchedulerIR, seed, [Restless(seed), CachedFirst()])
    simulation.run()


def test_the_scheduler_is_found_by_its_name() -> None:
    assert PluginRegistry.load().resolve("scheduler", "base") is BaseSchedulerIR
