"""What every scheduler must do, as test classes to subclass."""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest

from sagellm.core.errors import ConfigError, EngineError, InvalidInputError
from sagellm.core.ids import RequestId
from sagellm.core.protocols.request_rows import PrefixHit, RequestRows, ScheduleRequest
from sagellm.core.protocols.scheduler_ir import (
    Decision,
    NullSchedulerPass,
    ScheduleIR,
    SchedulePlan,
    SchedulerIRProtocol,
    SchedulerMetrics,
    SchedulerPassProtocol,
)
from sagellm.core.runtime import Clock, Randomness, VirtualClock
from sagellm.core.tenant import DEFAULT_TENANT
from sagellm.core.tokens import TokenIds
from sagellm.testing.cost import CPUClock, slowness
from sagellm.testing.schedule_simulation import Limits, ScheduleSimulation, check_plan
from sagellm.testing.schedule_states import (
    TENANTS,
    State,
    decoding_request,
    make_ir,
    random_state,
    waiting_request,
)


def summary(plan: SchedulePlan) -> tuple[object, ...]:
    """Return everything that a plan decides as comparable values."""
    return (
        [(entry.request_id, entry.num_tokens, entry.num_new_blocks) for entry in plan.scheduled_requests],
        [request.request_id for request in plan.preempted_requests],
        (plan.num_admitted, plan.num_deferred, plan.deferred_reason),
    )


TWO_OF_EACH: State = (
    [waiting_request(Random(0), f"p{i}") for i in range(2)],
    [decoding_request(f"r{i}") for i in range(2)],
    Limits(max_num_batched_tokens=8, max_num_seqs=4, block_size=16, available_memory=9),
)


def _plant(ir: ScheduleIR, kind: Any, target: Any, rows: Any, value: Any = None) -> ScheduleIR:
    """Add a decision by hand, as no method of the IR would."""
    return replace(ir, decisions=(*ir.decisions, Decision(kind, target, rows, value)))


def _rows_of(ir: ScheduleIR) -> Any:
    """Return an array with the row 0."""
    return ir.order_pending([0]).decisions[-1].rows


def _write(target: Any, name: str, value: Any) -> None:
    setattr(target, name, value)


FAULTS: dict[str, Callable[[ScheduleIR], Any]] = {
    "loses a waiting request": lambda ir: ir.order_pending([0]),
    "loses a running request": lambda ir: ir.order_running([]),
    "doubles a waiting request": lambda ir: ir.order_pending([0, 1, 1]),
    "doubles a running request": lambda ir: ir.order_running([1, 1]),
    "invents a waiting request": lambda ir: ir.order_pending([0, 1, 2]),
    "invents a running request": lambda ir: ir.order_running([-1, 0]),
    "replaces the waiting requests": lambda ir: replace(ir, pending=RequestRows.of([*ir.pending])),
    "replaces the running requests": lambda ir: replace(ir, running=ir.running[:1]),
    "names rows by fractions": lambda ir: ir.defer([0.5], "later"),  # type: ignore[list-item]
    "raises the budget": lambda ir: ir.lower(max_num_batched_tokens=9),
    "raises the seats": lambda ir: ir.lower(max_num_seqs=5),
    "raises the memory": lambda ir: ir.lower(available_memory=10),
    "sets a limit below 0": lambda ir: ir.lower(available_memory=-1),
    "sets a limit behind the log": lambda ir: replace(ir, max_num_seqs=1),
    "changes the block size": lambda ir: replace(ir, block_size=8),
    "changes the time": lambda ir: replace(ir, now=ir.now + 1),
    "caps a waiting request at 0": lambda ir: ir.cap(0, pending=[0]),
    "caps below 0": lambda ir: ir.cap(-1, running=[0]),
    "caps above what a count can be": lambda ir: ir.cap(2**31, pending=[0]),
    "lets a waiting request yield": lambda ir: _plant(ir, "yield", "pending", ir.admission[:1], 1),
    "caps by a fraction": lambda ir: ir.cap(1.5, pending=[0]),  # type: ignore[arg-type]
    "defers an unknown request": lambda ir: ir.defer([2], "later"),
    "defers a request twice": lambda ir: ir.defer([1, 1], "later"),
    "defers without a reason": lambda ir: ir.defer([0], ""),
    "defers a running request": lambda ir: _plant(ir, "defer", "running", _rows_of(ir), "later"),
    "preempts an unknown request": lambda ir: ir.preempt([7]),
    "preempts a waiting request": lambda ir: _plant(ir, "preempt", "pending", _rows_of(ir), "swap"),
    "preempts in an unknown way": lambda ir: ir.preempt([0], "sleep"),  # type: ignore[arg-type]
    "swaps an unknown request": lambda ir: ir.swap([2]),
    "swaps a request twice": lambda ir: ir.swap([1, 1]),
    "swaps a waiting request": lambda ir: _plant(ir, "swap", "pending", _rows_of(ir)),
    "swaps for a reason": lambda ir: _plant(ir, "swap", "running", _rows_of(ir), "later"),
    "changes the epoch": lambda ir: replace(ir, epoch=-5),
    "masks other rows": lambda ir: ir.defer(ir.pending.priority[:1] == ir.pending.priority[:1], "later"),
    "decides something unknown": lambda ir: _plant(ir, "skip", "pending", _rows_of(ir)),
    "decides by a list": lambda ir: _plant(ir, "defer", "pending", [0], "later"),
    "replaces its state": lambda ir: replace(ir, state=[*(ir.state or ()), 1]),
    "does not decide by a tuple": lambda ir: replace(ir, decisions=None),  # type: ignore[arg-type]
    "decides something that is not a word": lambda ir: _plant(ir, [], "pending", _rows_of(ir)),
    "decides by a string": lambda ir: replace(ir, decisions=(*ir.decisions, "defer all")),  # type: ignore[arg-type]
    "writes to a row": lambda ir: _write(ir.pending[0], "priority", 9),
    "writes to a column": lambda ir: ir.running.priority.fill(9),
    "writes to the rows": lambda ir: _write(ir.running, "priority", ir.running.num_tokens),
    "writes to the prompt": lambda ir: ir.pending[0].token_ids.append(1),  # type: ignore[attr-defined]
    "writes to the schedule": lambda ir: _write(ir, "max_num_seqs", 1),
    "writes to a decision": lambda ir: ir.order_pending([0, 1]).decisions[-1].rows.fill(0),
    "returns nothing": lambda ir: None,
    "raises": lambda ir: 1 // 0,
}
"""What a pass must not do with two waiting and two running requests."""


class SchedulerPlanContract(ABC):
    """What holds for every plan. Override `make`."""

    @abstractmethod
    def make(self, **options: Any) -> SchedulerIRProtocol:
        """Return a new scheduler; the options are those of the protocol."""

    def make_for(self, limits: Limits, clock: Clock | None = None) -> SchedulerIRProtocol:
        """Return a new scheduler with given limits, without a probe, on virtual time."""
        return self.make(
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_num_seqs=limits.max_num_seqs,
            block_size=limits.block_size,
            probe=None,
            clock=clock or VirtualClock(),
        )

    def plan(self, scheduler: SchedulerIRProtocol, state: State) -> SchedulePlan:
        """Request one plan."""
        return scheduler.schedule(
            pending_requests=state[0],
            running_requests=state[1],
            available_memory=state[2].available_memory,
        )

    def test_nothing_to_do_gives_an_empty_plan(self) -> None:
        """No requests, no entries."""
        limits = Limits(max_num_batched_tokens=8, max_num_seqs=2, block_size=16, available_memory=4)
        plan = self.plan(self.make_for(limits), ([], [], limits))
        assert not plan.scheduled_requests
        assert not plan.preempted_requests
        assert (plan.num_admitted, plan.num_deferred, plan.deferred_reason) == (0, 0, None)

    @pytest.mark.parametrize("seed", range(20))
    def test_a_plan_fits_whatever_the_state(self, seed: int) -> None:
        """Blocks, tokens and seats suffice and nobody is scheduled twice."""
        rng = Randomness(seed).stream("states")
        for _ in range(20):
            state = random_state(rng)
            plan = self.plan(self.make_for(state[2]), state)
            check_plan(plan, pending=state[0], running=state[1], limits=state[2])

    def test_planning_writes_nothing(self) -> None:
        """The requests and their lists belong to the engine, which alone executes plans."""
        rng = Randomness(1).stream("states")
        for _ in range(50):
            state = random_state(rng)
            before = repr(state)
            self.plan(self.make_for(state[2]), state)
            assert repr(state) == before

    def test_equal_histories_give_equal_plans_and_instances_share_nothing(self) -> None:
        """A third scheduler that plans other states in between changes nothing for two that agree."""
        rng = Randomness(2).stream("states")
        _, _, limits = random_state(rng)
        first, second, third = (self.make_for(limits) for _ in range(3))
        for _ in range(50):
            pending, running, _ = random_state(rng)
            state = (pending, running, limits)
            plan = self.plan(first, state)
            self.plan(third, random_state(rng))
            assert summary(plan) == summary(self.plan(second, state))

    def test_metrics_are_a_copy(self) -> None:
        """Readers cannot change the counts."""
        limits = Limits(max_num_batched_tokens=8, max_num_seqs=2, block_size=16, available_memory=4)
        scheduler = self.make_for(limits)
        before = scheduler.metrics()
        assert isinstance(before, SchedulerMetrics)
        before.num_steps += 5
        assert scheduler.metrics().num_steps == before.num_steps - 5


class SchedulerContract(SchedulerPlanContract):
    """What holds for every scheduler that makes progress. Override `make`."""

    num_seeds = 100
    max_schedule_ns = 2_000_000  # for 32 running requests that decode, 1,000 waiting

    @pytest.mark.parametrize("part", range(10))
    def test_every_request_ends_under_random_load(self, part: int) -> None:
        """Plans fit, blocks balance, every request gets a turn within a bound, none starves."""
        for seed in range(part, self.num_seeds, 10):
            ScheduleSimulation(self.make, seed).run()

    @pytest.mark.parametrize(("budget", "num_running"), [(1, 5), (2, 3), (3, 7), (4, 6)])
    def test_a_budget_below_the_number_running_lets_decodes_rotate(
        self, budget: int, num_running: int
    ) -> None:
        """After as many steps as there are requests, each has had as many turns as the budget."""
        limits = Limits(max_num_batched_tokens=budget, max_num_seqs=8, block_size=16, available_memory=50)
        scheduler = self.make_for(limits)
        running = [decoding_request(f"r{i}") for i in range(num_running)]
        ids: list[str] = []
        for _ in range(num_running):
            plan = self.plan(scheduler, ([], running, limits))
            ids += [entry.request_id for entry in plan.scheduled_requests]
            for row in plan.rows.tolist():
                running[row] = replace(running[row], last_scheduled_step=plan.step)
        assert sorted(ids) == sorted([request.request_id for request in running] * budget)

    def test_the_probe_is_asked_before_a_request_is_admitted(self) -> None:
        """Its answer decides how much is computed, and is in the plan."""
        scheduler = self.make(
            max_num_batched_tokens=64,
            max_num_seqs=2,
            block_size=16,
            probe=lambda request: PrefixHit(32, 1),
            clock=VirtualClock(),
        )
        request = ScheduleRequest(RequestId("a"), TokenIds(bytes(4 * 40)), 8)
        plan = scheduler.schedule(pending_requests=[request], running_requests=[], available_memory=1)
        assert [tuple(entry) for entry in plan.admitted] == [(0, 8, 1, 32)]

    def test_negative_memory_is_refused(self) -> None:
        """It would be the engine's mistake."""
        limits = Limits(max_num_batched_tokens=8, max_num_seqs=2, block_size=16, available_memory=-1)
        with pytest.raises(InvalidInputError, match="-1"):
            self.plan(self.make_for(limits), ([], [], limits))

    def test_the_null_pass_changes_no_plan(self) -> None:
        """The pipeline itself decides nothing."""
        rng = Randomness(3).stream("states")
        for _ in range(100):
            state = random_state(rng)
            piped = self.make_for(state[2])
            piped.add_optimization_pass(NullSchedulerPass())
            assert summary(self.plan(piped, state)) == summary(self.plan(self.make_for(state[2]), state))

    @pytest.mark.parametrize("fault", FAULTS)
    def test_a_pass_that_breaks_a_rule_is_named(self, fault: str) -> None:
        """Both by `apply_pass` and in a step."""
        scheduler, state = self.make_for(TWO_OF_EACH[2]), TWO_OF_EACH
        with pytest.raises(EngineError, match="faulty"):
            scheduler.apply_pass(_Edit(FAULTS[fault]), make_ir(state))
        scheduler.add_optimization_pass(_Edit(FAULTS[fault]))
        with pytest.raises(EngineError, match="faulty"):
            self.plan(scheduler, state)

    def test_what_passes_decide_holds_in_the_plan(self) -> None:
        """Deferrals, preemptions, caps and limits; each decision bears the name of its pass."""
        rng = Randomness(4).stream("states")
        for _ in range(200):
            state = random_state(rng)
            given, decided = make_ir(state), _decide(make_ir(state), rng)
            scheduler = self.make_for(state[2])
            scheduler.add_optimization_pass(_Edit(lambda ir: replace(ir, **_edits(decided)), "chosen"))  # noqa: B023
            plan = self.plan(scheduler, state)
            limits = replace(
                state[2],
                max_num_batched_tokens=decided.max_num_batched_tokens,
                max_num_seqs=decided.max_num_seqs,
                available_memory=decided.available_memory,
            )
            check_plan(plan, pending=given.pending, running=given.running, limits=limits)
            assert [decision.made_by for decision in plan.decisions] == ["chosen"] * len(decided.decisions)
            assert set(decided.preempted) <= set(plan.preempted)
            assert set(plan.swapped) == set(plan.preempted) & decided.swapped
            admitted = [entry.row for entry in plan.admitted]
            assert not set(admitted) & set(decided.deferred)
            assert admitted == [row for row in decided.admission.tolist() if row in admitted]
            assert (plan.num_tokens <= decided.caps("running")[plan.rows]).all()
            assert all(entry.num_tokens <= decided.caps("pending")[entry.row] for entry in plan.admitted)

    def test_a_request_yields_only_while_one_of_its_tenant_may_be_admitted(self) -> None:
        """Or one with a trusted priority: a later pass may defer those for whom an earlier one made room."""
        limits = Limits(max_num_batched_tokens=64, max_num_seqs=4, block_size=16, available_memory=99)
        red, gold = TENANTS[1], TENANTS[3]
        long = replace(decoding_request("long"), num_tokens=500, num_blocks=2, tenant=red)
        for tenant, priority, deferred, num_tokens in (
            (red, 0, [], 4),
            (red, 0, [0], 64),
            (DEFAULT_TENANT, 5, [], 64),
            (gold, 0, [], 64),
            (gold, 1, [], 4),
            (gold, 1, [0], 64),
        ):
            waiting = replace(
                waiting_request(Random(0), "short"), tenant=tenant, priority=priority, kv_blocks_needed=1
            )
            scheduler = self.make_for(limits)
            scheduler.add_optimization_pass(
                _Edit(lambda ir, rows=deferred: ir.yield_to_pending(4, [0]).defer(rows, "limit"))  # type: ignore[misc]
            )
            plan = self.plan(scheduler, ([waiting], [long], limits))
            assert plan.num_tokens.tolist() == [num_tokens], (tenant.name, priority, deferred)
            assert bool(plan.admitted) == (num_tokens == 4), (
                "what is yielded is what others are admitted with"
            )

    def test_a_pass_keeps_its_state_from_step_to_step(self) -> None:
        """Each pass has its own, from its `start`."""
        scheduler, seen = self.make_for(TWO_OF_EACH[2]), []

        def count(ir: ScheduleIR) -> ScheduleIR:
            ir.state.append(ir.step)
            seen.append(tuple(ir.state))
            return ir

        for _ in range(2):
            scheduler.add_optimization_pass(_Edit(count))
        steps = [self.plan(scheduler, TWO_OF_EACH).step for _ in range(2)]
        assert seen == [(steps[0],), (steps[0],), tuple(steps), tuple(steps)]

    def test_passes_are_shown_and_replaced_between_steps(self) -> None:
        """Unless the scheduler says by ConfigError that it does neither."""
        scheduler, seen = self.make_for(TWO_OF_EACH[2]), []
        scheduler.add_optimization_pass(_Edit(lambda ir: ir.defer([0], "early"), "first"))
        try:
            scheduler.watch(lambda name, before, after: seen.append((name, len(after.decisions))))
            decided = [self.plan(scheduler, TWO_OF_EACH).decisions[0].made_by]
            scheduler.set_passes([_Edit(lambda ir: ir.defer([1], "late"), "second")])
        except ConfigError as error:
            pytest.skip(str(error))
        decided.append(self.plan(scheduler, TWO_OF_EACH).decisions[0].made_by)
        assert decided == ["first", "second"]
        assert seen == [("first", 1), ("second", 1)]

    def test_steps_are_lengthened_and_shortened_again(self) -> None:
        """Passes see it; a scheduler without a target ignores it."""
        seen: list[float | None] = []

        def see(ir: ScheduleIR) -> ScheduleIR:
            seen.append(ir.step_target_ms)
            return ir

        scheduler = self.make(
            max_num_batched_tokens=9, max_num_seqs=3, block_size=16, clock=VirtualClock(), step_target_ms=80.0
        )
        scheduler.add_optimization_pass(_Edit(see))
        for factor in (1, 8, 1):
            scheduler.lengthen_steps(factor)
            self.plan(scheduler, TWO_OF_EACH)
        usual, longer, again = seen
        assert again == usual
        assert longer in (usual, None if usual is None else 8 * usual)

    def test_steps_of_a_steady_plan_are_counted(self) -> None:
        """A plan is steady only if nothing waits and all running requests decode; no plan need be."""
        _, running, limits = TWO_OF_EACH
        scheduler = self.make_for(limits)
        assert not self.plan(scheduler, TWO_OF_EACH).is_steady
        prefill = replace(running[0], num_tokens=25)
        assert not self.plan(scheduler, ([], [prefill, running[1]], limits)).is_steady
        plan = self.plan(scheduler, ([], running, limits))
        before = scheduler.metrics()
        scheduler.repeat(plan, 3)
        after = scheduler.metrics()
        if plan.is_steady:
            assert after.num_steps == before.num_steps + 3
            assert after.num_scheduled_tokens == before.num_scheduled_tokens + 3 * len(running)

    def test_hits_are_seen_before_ordering(self) -> None:
        """A pass queries the probe, and only for the requests whose hit it needs."""
        asked = []

        def probe(request: ScheduleRequest) -> PrefixHit:
            asked.append(request.request_id)
            return PrefixHit(16 if request.request_id == "p1" else 0, 0)

        def best_first(ir: ScheduleIR) -> ScheduleIR:
            hits = [hit.num_tokens for hit in ir.hits(range(2))]
            return ir.order_pending(sorted(range(len(hits)), key=lambda row: -hits[row]))

        scheduler = self.make(
            max_num_batched_tokens=9, max_num_seqs=3, block_size=16, probe=probe, clock=VirtualClock()
        )
        scheduler.add_optimization_pass(_Edit(best_first))
        plan = self.plan(scheduler, TWO_OF_EACH)
        assert [entry.row for entry in plan.admitted] == [1]
        assert asked[:2] == ["p0", "p1"]

    def test_counts_add_up(self) -> None:
        """Metrics equal what the plans said."""
        simulation = ScheduleSimulation(self.make, 7)
        plans: list[SchedulePlan] = []
        schedule = simulation.scheduler.schedule

        def record(**state: Any) -> SchedulePlan:
            plans.append(schedule(**state))
            return plans[-1]

        simulation.scheduler.schedule = record  # type: ignore[method-assign]
        simulation.run()
        metrics = simulation.scheduler.metrics()
        assert metrics.num_steps == len(plans)
        assert metrics.num_scheduled_tokens == sum(plan.num_scheduled_tokens for plan in plans)
        assert metrics.num_admitted == sum(plan.num_admitted for plan in plans)
        assert metrics.num_preempted == sum(len(plan.preempted) for plan in plans)
        assert metrics.num_idle_steps == sum(not plan.scheduled_requests for plan in plans)

    def test_a_decode_step_keeps_its_cost_budget(self) -> None:
        """Generous: it catches work per waiting request, not a slow machine."""
        limits = Limits(max_num_batched_tokens=64, max_num_seqs=32, block_size=16, available_memory=500)
        scheduler = self.make_for(limits, CPUClock())
        rng = Random(0)
        state = (
            [waiting_request(rng, f"p{i}") for i in range(1000)],
            [decoding_request(f"r{i}") for i in range(32)],
            limits,
        )
        costs = []
        for _ in range(50):
            self.plan(scheduler, state)
            costs.append(scheduler.metrics().last_schedule_ns)
        assert 0 < statistics.median(costs) < self.max_schedule_ns * slowness()


@dataclass(frozen=True)
class _Edit(SchedulerPassProtocol):
    edit: Callable[[ScheduleIR], Any]
    title: str = "faulty"

    @property
    def name(self) -> str:
        return self.title

    def start(self) -> list[int]:
        return []

    def run(self, ir: ScheduleIR) -> ScheduleIR:
        result: ScheduleIR = self.edit(ir)
        return result


def _decide(ir: ScheduleIR, rng: Random) -> ScheduleIR:
    """Make random valid decisions."""
    pending, running = list(range(len(ir.pending))), list(range(len(ir.running)))
    ir = ir.order_pending(rng.sample(pending, len(pending)))
    ir = ir.order_running(rng.sample(running, len(running)))
    ir = ir.defer(rng.sample(pending, len(pending) // 3), "later")
    ir = ir.preempt(
        rng.sample(running, rng.choice((0, 0, len(running) // 3))), rng.choice(("swap", "recompute"))
    )
    ir = ir.swap(rng.sample(running, len(running) // 2))
    ir = ir.cap(rng.randint(1, 9), pending=pending[::2], running=running[::2]).cap(0, running=running[::5])
    return ir.lower(
        max_num_batched_tokens=rng.randint(0, ir.max_num_batched_tokens),
        max_num_seqs=rng.choice((None, ir.max_num_seqs // 2)),
        available_memory=rng.choice((None, ir.available_memory // 2)),
    )


def _edits(ir: ScheduleIR) -> dict[str, Any]:
    names = ("decisions", "max_num_batched_tokens", "max_num_seqs", "available_memory")
    return {name: getattr(ir, name) for name in names}
