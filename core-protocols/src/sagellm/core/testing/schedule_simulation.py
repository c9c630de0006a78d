"""An engine without a model, which checks every plan of a scheduler while carrying it out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sagellm.core.protocols.scheduler_ir import SchedulePlan, ScheduleRequest, SchedulerIRProtocol
from sagellm.core.runtime import Randomness, VirtualClock
from sagellm.core.tokens import TokenIds

DEFERRED_REASONS = ("tokens", "seats", "blocks", "preemption")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a plan has to fit into."""

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
    num_running = len(plan.scheduled_requests) - plan.num_admitted
    served, admitted = plan.scheduled_requests[:num_running], plan.scheduled_requests[num_running:]
    kept = [request for request in running if request not in plan.preempted_requests]
    assert all(request in running for request in plan.preempted_requests), "preempts who does not run"
    assert len(kept) + len(plan.preempted_requests) == len(running), "preempts a request twice"
    assert all(entry.request in kept for entry in served), "serves who does not run"
    assert all(entry.request in pending for entry in admitted), "admits who does not wait"
    ids = [entry.request_id for entry in plan.scheduled_requests]
    assert len(set(ids)) == len(ids), "schedules a request twice"
    for entry in plan.scheduled_requests:
        assert entry.num_tokens >= 1, "schedules no tokens"
        assert entry.num_new_blocks >= 0, "gives a negative number of blocks"
    for entry in served:
        end = entry.request.num_computed_tokens + entry.num_tokens
        assert end <= entry.request.num_tokens, "computes tokens that do not exist"
        held = entry.request.num_blocks + entry.num_new_blocks
        assert held * limits.block_size >= end, "computes tokens that no block holds"
    for entry in admitted:
        left = entry.request.num_tokens - entry.request.prefix_cache_hit
        assert entry.num_tokens <= max(left, 1), "computes tokens that do not exist"
    freed = sum(request.num_blocks for request in plan.preempted_requests)
    taken = sum(entry.num_new_blocks for entry in plan.scheduled_requests)
    assert taken <= limits.available_memory + freed, "takes more blocks than there are"
    assert plan.num_tokens <= limits.max_num_batched_tokens, "spends more tokens than the budget"
    assert not admitted or len(kept) + len(admitted) <= limits.max_num_seqs, "fills more seats than there are"
    assert plan.num_deferred == len(pending) - plan.num_admitted, "counts those that stay waiting wrongly"
    assert plan.deferred_reason in ((None, *DEFERRED_REASONS) if plan.num_deferred else (None,))


@dataclass(kw_only=True, eq=False)
class _Job:
    """What the simulation knows of a request and the scheduler does not."""

    state: ScheduleRequest
    arrival_step: int
    num_output_tokens: int
    shared_blocks: int  # cached for ever, outside the pool
    num_generated: int = 0
    idle_steps: int = 0


class ScheduleSimulation:
    """Random requests over a finite pool, on virtual time, all from one seed.

    Some prefixes are cached in blocks that stay in use when their request is preempted, so that
    plans meet allocations that fail.
    """

    def __init__(self, make: Callable[..., SchedulerIRProtocol], seed: int) -> None:
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
        self._jobs: dict[str, _Job] = {}
        longest = min(rng.choice((12, 300)), 12 * self.budget)
        step = 0
        for index in range(rng.randint(1, 20)):
            step += rng.choice((0, 0, rng.randint(0, 12)))
            prompt = rng.randint(1, longest)
            state = ScheduleRequest(
                request_id=f"r{index}",
                token_ids=TokenIds(bytes(4 * prompt)),
                max_tokens=80,
                priority=rng.choice((0, 0, 0, 1, 5)),
                arrived_time=float(step),
            )
            shared = rng.choice((0, (prompt - 1) // self.block_size))
            self._jobs[state.request_id] = _Job(
                state=state, arrival_step=step, num_output_tokens=rng.randint(1, 80), shared_blocks=shared
            )
        most = max(self._own_blocks_at_end(job) for job in self._jobs.values())
        self.total_blocks = most + rng.choice((0, rng.randint(0, most), rng.randint(0, 4 * most)))
        self.num_free = self.total_blocks
        self.pending: list[ScheduleRequest] = []
        self.running: list[ScheduleRequest] = []
        self.num_steps = 0
        self.num_preempted = 0
        self.num_dropped_plans = 0

    def run(self) -> None:
        """Step until every request has ended. Raises AssertionError where the contract is broken."""
        waiting = sorted(self._jobs.values(), key=lambda job: job.arrival_step, reverse=True)
        num_tokens = sum(len(job.state.token_ids) + job.num_output_tokens for job in self._jobs.values())
        limit = 1000 + 20 * num_tokens
        while waiting or self.pending or self.running:
            while waiting and waiting[-1].arrival_step <= self.num_steps:
                self.pending.append(waiting.pop().state)
            self.step()
            self.check_integrity()
            assert self.num_steps < limit, f"requests starve: {len(self.pending)} wait, {self.running} run"

    def step(self) -> None:
        """Ask for one plan, check it, carry it out."""
        limits = Limits(
            max_num_batched_tokens=self.budget,
            max_num_seqs=self.max_num_seqs,
            block_size=self.block_size,
            available_memory=self.num_free,
        )
        pending, running = tuple(self.pending), tuple(self.running)
        plan = self.scheduler.schedule(
            pending_requests=pending, running_requests=running, available_memory=self.num_free
        )
        check_plan(plan, pending=pending, running=running, limits=limits)
        for request in reversed(plan.preempted_requests):
            self._preempt(request)
        whole = self._execute(plan)
        if whole:
            self._check_turns(plan)
        self.num_steps += 1
        self.clock.advance_ns(1_000_000)

    def check_integrity(self) -> None:
        """Raise AssertionError if blocks or requests got lost."""
        held = sum(r.num_blocks - self._jobs[r.request_id].shared_blocks for r in self.running)
        assert held + self.num_free == self.total_blocks
        assert self.num_free >= 0
        assert not set(map(id, self.pending)) & set(map(id, self.running))
        assert len(self.running) <= self.max_num_seqs

    def _execute(self, plan: SchedulePlan) -> bool:
        for entry in plan.scheduled_requests:
            if entry.num_new_blocks > self.num_free:
                self.num_dropped_plans += 1
                return False  # shared blocks did not come back: the rest of the plan is dropped
            request, job = entry.request, self._jobs[entry.request_id]
            self.num_free -= entry.num_new_blocks
            request.num_blocks += entry.num_new_blocks
            if request in self.pending:
                self.pending.remove(request)
                self.running.append(request)
                request.num_blocks += job.shared_blocks
                request.num_computed_tokens = request.prefix_cache_hit
            request.num_computed_tokens += entry.num_tokens
            job.idle_steps = 0
            if request.num_computed_tokens == request.num_tokens:
                self._generate(job)
        return True

    def _generate(self, job: _Job) -> None:
        job.num_generated += 1
        job.state.num_tokens += 1
        if job.num_generated == job.num_output_tokens:
            self.running.remove(job.state)
            self.num_free += job.state.num_blocks - job.shared_blocks

    def _preempt(self, request: ScheduleRequest) -> None:
        self.running.remove(request)
        self.pending.insert(0, request)
        self.num_free += request.num_blocks - self._jobs[request.request_id].shared_blocks
        request.num_blocks = request.num_computed_tokens = 0
        self.num_preempted += 1

    def _check_turns(self, plan: SchedulePlan) -> None:
        served = {entry.request_id for entry in plan.scheduled_requests}
        left = sum(request.num_tokens - request.num_computed_tokens for request in self.running)
        bound = -(-left // self.budget) + 2 * len(self.running)
        for request in self.running:
            job = self._jobs[request.request_id]
            job.idle_steps = 0 if request.request_id in served else job.idle_steps + 1
            assert job.idle_steps <= bound, f"{request.request_id} runs without a turn for {bound} steps"

    def _probe(self, request: ScheduleRequest) -> None:
        job = self._jobs[request.request_id]
        request.prefix_cache_hit = job.shared_blocks * self.block_size
        if job.shared_blocks % 2:
            request.kv_blocks_needed = -(-request.num_tokens // self.block_size) - job.shared_blocks

    def _own_blocks_at_end(self, job: _Job) -> int:
        num_tokens = len(job.state.token_ids) + job.num_output_tokens
        return -(-num_tokens // self.block_size) - job.shared_blocks
