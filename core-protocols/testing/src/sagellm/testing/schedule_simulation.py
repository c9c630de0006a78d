"""An engine without a model, which checks every plan of a scheduler while carrying it out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sagellm.core.protocols.request_rows import PrefixHit, ScheduleRequest
from sagellm.core.protocols.scheduler_ir import (
    SchedulePlan,
    SchedulerIRProtocol,
    SchedulerPassProtocol,
)
from sagellm.core.runtime import Randomness, VirtualClock
from sagellm.core.tokens import TokenIds

DEFERRED_REASONS = ("tokens", "seats", "blocks", "preemption", "pass")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits that a plan must respect."""

    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int
    available_memory: int


def check_plan(
    plan: SchedulePlan,
    *,
    pending: Sequence[ScheduleRequest],
    running: Sequence[ScheduleRequest],
    limits: Limits,
) -> None:
    """Raise AssertionError if a plan does not fit, or contradicts the requests it was made from."""
    kept = set(range(len(running))) - set(plan.preempted)
    assert len(kept) + len(plan.preempted) == len(running), "preempts who does not run, or a request twice"
    assert set(plan.swapped) <= set(plan.preempted), "swaps who is not preempted"
    rows, waiting = plan.rows.tolist(), [entry.row for entry in plan.admitted]
    assert set(rows) <= kept, "serves who does not run"
    assert set(waiting) <= set(range(len(pending))), "admits who does not wait"
    assert len(set(rows)) == len(rows), "serves a request twice"
    assert len(set(waiting)) == len(waiting), "admits a request twice"
    served = list(zip(rows, plan.num_tokens.tolist(), plan.num_new_blocks.tolist(), strict=True))
    for _, num_tokens, num_new_blocks in (*served, *(entry[:3] for entry in plan.admitted)):
        assert num_tokens >= 1, "schedules no tokens"
        assert num_new_blocks >= 0, "gives a negative number of blocks"
    for row, num_tokens, num_new_blocks in served:
        end = running[row].num_computed_tokens + num_tokens
        assert end <= running[row].num_tokens, "computes tokens that do not exist"
        held = running[row].num_blocks + num_new_blocks
        assert held * limits.block_size >= end, "computes tokens that no block holds"
    for entry in plan.admitted:
        left = pending[entry.row].num_tokens - entry.hit
        assert entry.num_tokens <= max(left, 1), "computes tokens that do not exist"
    freed = sum(running[row].num_blocks for row in plan.preempted)
    taken = int(plan.num_new_blocks.sum()) + sum(entry.num_new_blocks for entry in plan.admitted)
    assert taken <= limits.available_memory + freed, "takes more blocks than there are"
    assert plan.num_scheduled_tokens <= limits.max_num_batched_tokens, "spends more tokens than the budget"
    num_seats = len(kept) + plan.num_admitted
    assert not waiting or num_seats <= limits.max_num_seqs, "fills more seats than there are"
    assert plan.num_deferred == len(pending) - plan.num_admitted, "counts those that stay waiting wrongly"
    assert plan.deferred_reason in ((None, *DEFERRED_REASONS) if plan.num_deferred else (None,))


@dataclass(kw_only=True, eq=False)
class _Job:
    """The simulation's state of a request, and the row that shows the scheduler a part of it."""

    row: ScheduleRequest
    arrival_step: int
    num_output_tokens: int
    shared_blocks: int  # cached forever, outside the pool
    num_generated: int = 0
    idle_steps: int = 0

    def change(self, **values: Any) -> None:
        self.row = replace(self.row, **values)


class ScheduleSimulation:
    """Random requests over a finite pool, on virtual time, all from one seed.

    Some prefixes are cached in blocks that stay in use when their request is preempted, so that
    plans encounter allocations that fail.
    """

    def __init__(
        self,
        make: Callable[..., SchedulerIRProtocol],
        seed: int,
        passes: Sequence[SchedulerPassProtocol] = (),
    ) -> None:
        rng = Randomness(seed).stream("schedule")
        self.block_size = rng.choice((1, 2, 8, 16))
        self.budget = rng.choice((1, 2, 17, rng.randint(1, 512)))
        self.max_num_seqs = rng.randint(1, 12)
        self.clock = VirtualClock()
        self.scheduler = make(
            max_num_batched_tokens=self.budget,
            max_num_seqs=self.max_num_seqs,
            block_size=self.block_size,
            probe=self._probe,
            clock=self.clock,
        )
        for optimization_pass in passes:
            self.scheduler.add_optimization_pass(optimization_pass)
        self._jobs: dict[str, _Job] = {}
        longest = min(rng.choice((12, 300)), 12 * self.budget)
        step = 0
        for index in range(rng.randint(1, 20)):
            step += rng.choice((0, 0, rng.randint(0, 12)))
            prompt = rng.randint(1, longest)
            row = ScheduleRequest(
                request_id=f"r{index}",
                token_ids=TokenIds(bytes(4 * prompt)),
                max_tokens=80,
                priority=rng.choice((0, 0, 0, 1, 5)),
                arrived_time=float(step),
            )
            shared = rng.choice((0, (prompt - 1) // self.block_size))
            self._jobs[row.request_id] = _Job(
                row=row, arrival_step=step, num_output_tokens=rng.randint(1, 80), shared_blocks=shared
            )
        most = max(self._own_blocks_at_end(job) for job in self._jobs.values())
        self.total_blocks = most + rng.choice((0, rng.randint(0, most), rng.randint(0, 4 * most)))
        self.num_free = self.total_blocks
        self._pending: list[_Job] = []
        self._running: list[_Job] = []
        self.num_steps = 0
        self.num_preempted = 0
        self.num_dropped_plans = 0

    def run(self) -> None:
        """Step until every request has ended. Raises AssertionError if the contract is broken."""
        waiting = sorted(self._jobs.values(), key=lambda job: job.arrival_step, reverse=True)
        num_tokens = sum(len(job.row.token_ids) + job.num_output_tokens for job in self._jobs.values())
        limit = 1000 + 20 * num_tokens
        while waiting or self._pending or self._running:
            while waiting and waiting[-1].arrival_step <= self.num_steps:
                self._pending.append(waiting.pop())
            self.step()
            self.check_integrity()
            assert self.num_steps < limit, (
                f"requests starve: {len(self._pending)} wait, {[job.row for job in self._running]} run"
            )

    def step(self) -> None:
        """Request one plan, check it, execute it."""
        limits = Limits(
            max_num_batched_tokens=self.budget,
            max_num_seqs=self.max_num_seqs,
            block_size=self.block_size,
            available_memory=self.num_free,
        )
        pending, running = tuple(self._pending), tuple(self._running)
        waiting_rows, running_rows = [job.row for job in pending], [job.row for job in running]
        plan = self.scheduler.schedule(
            pending_requests=waiting_rows, running_requests=running_rows, available_memory=self.num_free
        )
        check_plan(plan, pending=waiting_rows, running=running_rows, limits=limits)
        for row in reversed(plan.preempted):
            self._preempt(running[row])
        if self._execute(plan, pending, running):
            served = [running[row] for row in plan.rows.tolist()]
            self._check_turns([*served, *(pending[entry.row] for entry in plan.admitted)])
        self.num_steps += 1
        self.clock.advance_ns(1_000_000_000)

    def check_integrity(self) -> None:
        """Raise AssertionError if blocks or requests got lost."""
        held = sum(job.row.num_blocks - job.shared_blocks for job in self._running)
        assert held + self.num_free == self.total_blocks
        assert self.num_free >= 0
        assert not set(map(id, self._pending)) & set(map(id, self._running))
        assert len(self._running) <= self.max_num_seqs

    def _execute(self, plan: SchedulePlan, pending: Sequence[_Job], running: Sequence[_Job]) -> bool:
        """Execute a plan until an allocation fails because shared blocks did not come back."""
        served = zip(plan.rows.tolist(), plan.num_tokens.tolist(), plan.num_new_blocks.tolist(), strict=True)
        for row, num_tokens, num_new_blocks in served:
            job = running[row]
            if not self._compute(job, num_tokens, num_new_blocks, plan.step):
                return False
        for row, num_tokens, num_new_blocks, hit in plan.admitted:
            job = pending[row]
            assert hit == job.shared_blocks * self.block_size, "admits with a hit that the probe did not name"
            if num_new_blocks > self.num_free:
                self.num_dropped_plans += 1
                return False
            self._pending.remove(job)
            self._running.append(job)
            job.change(num_blocks=job.shared_blocks, num_computed_tokens=hit)
            self._compute(job, num_tokens, num_new_blocks, plan.step)
        return True

    def _compute(self, job: _Job, num_tokens: int, num_new_blocks: int, step: int) -> bool:
        if num_new_blocks > self.num_free:
            self.num_dropped_plans += 1
            return False
        self.num_free -= num_new_blocks
        num_computed = job.row.num_computed_tokens + num_tokens
        is_sampled = num_computed == job.row.num_tokens
        job.change(
            num_blocks=job.row.num_blocks + num_new_blocks,
            num_computed_tokens=num_computed,
            num_tokens=job.row.num_tokens + is_sampled,
            last_scheduled_step=step,
        )
        job.num_generated += is_sampled
        if job.num_generated == job.num_output_tokens:
            self._running.remove(job)
            self.num_free += job.row.num_blocks - job.shared_blocks
        return True

    def _preempt(self, job: _Job) -> None:
        self._running.remove(job)
        self._pending.insert(0, job)
        self.num_free += job.row.num_blocks - job.shared_blocks
        job.change(num_blocks=0, num_computed_tokens=0)
        self.num_preempted += 1

    def _check_turns(self, served: Sequence[_Job]) -> None:
        left = sum(job.row.num_tokens - job.row.num_computed_tokens for job in self._running)
        bound = -(-left // self.budget) + 2 * len(self._running)
        for job in self._running:
            job.idle_steps = 0 if job in served else job.idle_steps + 1
            assert job.idle_steps <= bound, f"{job.row.request_id} runs without a turn for {bound} steps"

    def _probe(self, request: ScheduleRequest) -> PrefixHit:
        shared = self._jobs[request.request_id].shared_blocks
        num_blocks = -(-request.num_tokens // self.block_size)
        return PrefixHit(shared * self.block_size, num_blocks - shared)

    def _own_blocks_at_end(self, job: _Job) -> int:
        num_tokens = len(job.row.token_ids) + job.num_output_tokens
        return -(-num_tokens // self.block_size) - job.shared_blocks
