"""Plans by array operations equal those of a scheduler that looks at one request after the other."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from sagellm.core.protocols.scheduler_ir import Decision
from sagellm.kvmgr.scheduler_ir import (
    BaseSchedulerIR,
    PrefixHit,
    RequestRows,
    ScheduleIR,
    SchedulePlan,
    ScheduleRequest,
)
from sagellm.kvmgr.scheduler_ir.hits import PrefixHits
from sagellm.kvmgr.scheduler_ir.schedule_text import schedule_to_text
from sagellm.kvmgr.scheduler_ir.step import Step
from sagellm.testing.schedule_states import TENANTS, decoding_request, make_ir, random_state


class Reference:
    """Plans a step as the rules are written, one request at a time."""

    def __init__(self, ir: ScheduleIR) -> None:
        self.ir = ir
        self.running = {row: each for row, each in enumerate(ir.running) if row not in ir.preempted}
        self.budget = ir.max_num_batched_tokens
        self.available = ir.available_memory + sum(ir.running[row].num_blocks for row in ir.preempted)
        self.served: dict[int, tuple[int, int]] = {}
        self.short: list[int] = []  # preempted for lack of blocks
        self.admitted: list[tuple[int, int, int, int]] = []
        self.serve()
        self.reason = self.admit()

    def cap(self, part: str, row: int) -> int:
        caps = [2**31]
        for each in self.ir.decisions:
            if each.target != part or row not in each.rows.tolist():
                continue
            if each.kind == "cap" or (each.kind == "yield" and self.may_let_in(row)):
                caps.append(int(each.value or 0))
        return min(caps)

    def may_let_in(self, row: int) -> bool:
        own = self.ir.running[row].tenant
        waiting = [each for row, each in enumerate(self.ir.pending) if row not in self.ir.deferred]
        return any(each.tenant == own or (each.tenant.is_trusted and each.priority > 0) for each in waiting)

    def serve(self) -> None:
        turns, reserved, share = list(self.running), len(self.running), 1
        if reserved > self.budget:
            start = self.ir.step * self.budget % len(turns)
            turns = turns[start:] + turns[:start]
            turns.sort(key=lambda row: self.running[row].last_scheduled_step)
            reserved = share = 0
        order = [row for row in self.ir.preemption.tolist() if row in self.running]
        for row in turns:
            request = self.running[row]
            reserved -= share
            left = min(request.num_tokens - request.num_computed_tokens, self.cap("running", row))
            num_tokens = min(left, self.budget - reserved)
            if num_tokens < 1 or row in self.short:
                continue
            end = request.num_computed_tokens + num_tokens
            num_blocks = max(-(-end // self.ir.block_size) - request.num_blocks, 0)
            while num_blocks > self.available and row not in self.short:
                victim = order.pop()
                self.short.append(victim)
                tokens_back, blocks_back = self.served.pop(victim, (0, 0))
                self.available += self.running[victim].num_blocks + blocks_back
                self.budget += tokens_back
            if row not in self.short:
                self.available -= num_blocks
                self.budget -= num_tokens
                self.served[row] = (num_tokens, num_blocks)

    def admit(self) -> str | None:
        if self.short:
            return "preemption" if len(self.ir.pending) else None
        for row in (row for row in self.ir.admission.tolist() if row not in self.ir.deferred):
            request = self.ir.pending[row]
            hit = request.stated_hit(self.ir.block_size)
            if len(self.running) + len(self.admitted) >= self.ir.max_num_seqs:
                return "seats"
            if self.budget < 1:
                return "tokens"
            if hit.num_blocks_needed > self.available:
                return "blocks"
            left = min(max(request.num_tokens - hit.num_tokens, 1), self.cap("pending", row))
            num_tokens = min(left, self.budget)
            self.budget -= num_tokens
            self.available -= hit.num_blocks_needed
            self.admitted.append((row, num_tokens, hit.num_blocks_needed, hit.num_tokens))
        return "pass" if self.ir.deferred else None

    def values(self) -> tuple[object, ...]:
        served = [(row, *what) for row, what in self.served.items()]
        return served, [*self.ir.preempted, *self.short], self.admitted, self.reason


def decide(ir: ScheduleIR, rng: Random) -> ScheduleIR:
    pending, running = range(len(ir.pending)), range(len(ir.running))
    for _ in range(rng.randint(1, 4)):
        ir = rng.choice(
            (
                lambda ir: ir.order_pending(rng.sample(pending, len(pending))),
                lambda ir: ir.order_running(rng.sample(running, len(running))),
                lambda ir: ir.cap(rng.randint(1, 40), pending=pending[::2]),
                lambda ir: ir.cap(
                    rng.choice((0, rng.randint(1, 40))), running=running[rng.randint(0, 2) :: 2]
                ),
                lambda ir: ir.yield_to_pending(rng.randint(0, 9), running[rng.randint(0, 2) :: 2]),
                lambda ir: ir.defer(rng.sample(pending, len(pending) // 2), "later"),
                lambda ir: ir.preempt(rng.sample(running, len(running) // 3)),
                lambda ir: ir.lower(max_num_batched_tokens=rng.randint(0, ir.max_num_batched_tokens)),
                lambda ir: ir.lower(max_num_seqs=rng.randint(0, ir.max_num_seqs)),
                lambda ir: ir.lower(available_memory=rng.randint(0, ir.available_memory)),
            )
        )(ir)
    return ir


def found(plan: SchedulePlan) -> tuple[object, ...]:
    arrays = (plan.rows, plan.num_tokens, plan.num_new_blocks)
    assert {array.dtype for array in arrays} == {np.dtype(np.int32)}
    served = list(zip(*(array.tolist() for array in arrays), strict=True))
    admitted = [tuple(entry) for entry in plan.admitted]
    return served, list(plan.preempted), admitted, plan.deferred_reason


def states(seed: int, num_states: int) -> list[ScheduleIR]:
    """Random schedules, half of them with decisions, some of them tight."""
    rng = Random(seed)
    made = []
    for _ in range(num_states):
        pending, running, limits = random_state(rng)
        if running and rng.random() < 0.1:  # more computed than known, as no engine should say
            running[0] = replace(running[0], num_computed_tokens=running[0].num_tokens + 2)
        if rng.random() < 0.3:
            limits = replace(limits, max_num_batched_tokens=rng.randint(1, 3 * len(running) + 1))
        pending, running = (
            [replace(each, tenant=rng.choice(TENANTS[::3])) for each in rows] for rows in (pending, running)
        )
        ir = make_ir((pending, running, limits), step=rng.randint(0, 9))
        made.append(decide(ir, rng) if rng.random() < 0.5 else ir)
    return made


@pytest.mark.parametrize("seed", range(10))
def test_plans_equal_those_of_the_reference(seed: int) -> None:
    for ir in states(seed, 300):
        plan = Step(ir, PrefixHits(None, lambda: 0, ir.block_size), may_repeat=True).plan()
        assert found(plan) == Reference(ir).values(), schedule_to_text(ir)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(10, 30))
def test_thirty_thousand_plans_equal_those_of_the_reference(seed: int) -> None:
    test_plans_equal_those_of_the_reference(1000 * seed)


def test_the_random_schedules_meet_every_case() -> None:
    schedules = [ir for seed in range(10) for ir in states(seed, 300)]
    plans = [Reference(ir) for ir in schedules]
    assert sum(len(ir.running) > ir.max_num_batched_tokens for ir in schedules) > 300
    assert sum(bool(plan.short) for plan in plans) > 300
    assert sum(bool(plan.admitted) for plan in plans) > 300
    assert sum(0 in ir.caps("running") for ir in schedules) > 100
    yielding = [ir for ir in schedules if any(each.kind == "yield" for each in ir.decisions)]
    with_caps = [ir.updated(decisions=tuple(map(as_cap, ir.decisions))) for ir in yielding]
    in_vain = [
        (ir.caps("running") < other.caps("running")).any()
        for other, ir in zip(yielding, with_caps, strict=True)
    ]
    assert 50 < sum(in_vain) < len(in_vain) - 50
    assert {plan.reason for plan in plans} == {None, "tokens", "seats", "blocks", "preemption", "pass"}


def as_cap(decision: Decision) -> Decision:
    return replace(decision, kind="cap") if decision.kind == "yield" else decision


def as_columns(requests: list[ScheduleRequest], rng: Random) -> RequestRows:
    """The same requests as an engine holds them: in larger tables, in another order."""
    index = np.array(rng.sample(range(len(requests) + 5), len(requests)), np.intp)
    given = RequestRows.of(requests)
    columns = {}
    for name in COLUMNS:
        values = getattr(given, name)
        wide = np.int64 if values.dtype == np.int32 else values.dtype
        columns[name] = np.full(len(requests) + 5, -7, wide)
        columns[name][index] = values
    by_index = dict(zip(index.tolist(), requests, strict=True))
    return RequestRows(columns, index, by_index.__getitem__)


COLUMNS = (
    "priority",
    "arrived_time",
    "num_prompt_tokens",
    "num_tokens",
    "num_computed_tokens",
    "num_blocks",
    "last_scheduled_step",
    "predicted_remaining_tokens",
)


def test_rows_of_an_engines_tables_give_the_plan_of_the_objects() -> None:
    rng = Random(3)
    for _ in range(200):
        pending, running, limits = random_state(rng)
        plans = [
            BaseSchedulerIR(limits.max_num_batched_tokens, limits.max_num_seqs, limits.block_size).schedule(
                pending_requests=waiting, running_requests=run, available_memory=limits.available_memory
            )
            for waiting, run in ((pending, running), (as_columns(pending, rng), as_columns(running, rng)))
        ]
        assert found(plans[0]) == found(plans[1])
        assert plans[0].scheduled_requests == plans[1].scheduled_requests
        assert plans[0].preempted_requests == plans[1].preempted_requests


def test_columns_are_gathered_once_and_read_only() -> None:
    requests = [decoding_request(f"r{i}") for i in range(4)]
    rows = RequestRows.of(requests)
    assert rows.num_tokens is rows.num_tokens
    for name in COLUMNS:
        with pytest.raises(ValueError, match="read-only"):
            getattr(rows, name)[:] = 0
    assert rows[1:3].num_tokens.tolist() == rows.num_tokens[1:3].tolist()
    assert ([*rows], rows[-1]) == (requests, requests[-1])
    with pytest.raises(IndexError):
        rows[len(rows)]


def test_positions_are_those_of_the_rows_and_kept_with_them() -> None:
    requests = [decoding_request(f"r{i}") for i in range(4)]
    rows = RequestRows.of(requests)
    assert rows.positions.tolist() == [0, 1, 2, 3]
    assert rows.positions is rows.positions
    assert rows[2:].positions.tolist() == [0, 1]
    assert RequestRows.of([]).positions.tolist() == []
    with pytest.raises(ValueError, match="read-only"):
        rows.positions[:] = 0
    columns, kept = {name: getattr(rows, name) for name in COLUMNS}, dict[str, object]()
    steps = [RequestRows(columns, np.array([3, 1]), requests.__getitem__, kept) for _ in range(2)]
    assert steps[0].positions is steps[1].positions
    assert steps[0].positions.tolist() == [0, 1]


def test_a_decode_step_of_all_has_the_positions_of_the_rows() -> None:
    running = RequestRows.of([decoding_request(f"r{i}") for i in range(3)])
    plan = BaseSchedulerIR().schedule(pending_requests=[], running_requests=running, available_memory=9)
    assert plan.rows is running.positions


class Untouchable(dict[str, "np.ndarray[object, object]"]):
    def __missing__(self, name: str) -> object:
        raise AssertionError(f"the column {name} of waiting requests was read")


def test_waiting_requests_that_are_not_considered_cost_nothing() -> None:
    made: list[int] = []

    def make(row: int) -> ScheduleRequest:
        made.append(row)
        return ScheduleRequest(f"p{row}", range(30), 8)

    waiting = RequestRows(Untouchable(), np.arange(1000), make)  # type: ignore[arg-type]
    scheduler = BaseSchedulerIR(max_num_batched_tokens=64, max_num_seqs=100, block_size=16)
    plan = scheduler.schedule(pending_requests=waiting, running_requests=[], available_memory=100)
    assert [entry.row for entry in plan.admitted] == made == [0, 1, 2]
    assert (plan.num_deferred, plan.deferred_reason) == (997, "tokens")


def test_a_decode_step_looks_at_no_request_by_itself() -> None:
    count = 1024
    columns = {
        "num_tokens": np.full(count, 101, np.int32),
        "num_computed_tokens": np.full(count, 100, np.int32),
        "num_blocks": np.full(count, 7, np.int32),
    }
    running = RequestRows(columns, np.arange(count), lambda row: pytest.fail(f"row {row} was made"))
    scheduler = BaseSchedulerIR(max_num_batched_tokens=2048, max_num_seqs=count, block_size=16)
    plan = scheduler.schedule(pending_requests=[], running_requests=running, available_memory=0)
    assert (plan.num_scheduled_tokens, len(plan.rows), int(plan.num_new_blocks.sum())) == (count, count, 0)


def test_hits_are_asked_for_once_while_the_epoch_stands() -> None:
    asked: list[str] = []
    epoch = [0]

    def probe(request: ScheduleRequest) -> PrefixHit:
        asked.append(request.request_id)
        return PrefixHit(0, 99)

    scheduler = BaseSchedulerIR(probe=probe, epoch=lambda: epoch[0])
    pending = [ScheduleRequest("a", range(9), 8), ScheduleRequest("b", range(9), 8)]

    def step() -> int:
        asked.clear()
        scheduler.schedule(pending_requests=pending, running_requests=[], available_memory=5)
        return len(asked)

    assert [step(), step()] == [1, 0]  # the first does not fit, so the second is not considered
    epoch[0] += 1
    assert [step(), step()] == [1, 0]
    pending[0] = replace(pending[0], num_tokens=10)  # it ran meanwhile
    assert [step(), step()] == [1, 0]


def test_hits_are_asked_for_at_each_step_without_an_epoch_and_after_an_admission() -> None:
    asked: list[str] = []

    def probe(request: ScheduleRequest) -> PrefixHit:
        asked.append(request.request_id)
        return PrefixHit(0, 1)

    pending = [ScheduleRequest("a", range(9), 8)]
    for epoch, available in ((None, 0), (lambda: 0, 5)):
        asked.clear()
        scheduler = BaseSchedulerIR(probe=probe, epoch=epoch)
        for _ in range(2):
            scheduler.schedule(pending_requests=pending, running_requests=[], available_memory=available)
        assert len(asked) == 2
