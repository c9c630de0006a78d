"""What every scheduler must do, as test classes to subclass."""

from __future__ import annotations

import copy
import statistics
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any

import pytest

from sagellm.core.errors import EngineError, InvalidInputError
from sagellm.core.ids import RequestId
from sagellm.core.protocols.scheduler_ir import (
    NullSchedulerPass,
    ScheduleIR,
    SchedulePlan,
    ScheduleRequest,
    SchedulerIRProtocol,
    SchedulerMetrics,
    SchedulerPassProtocol,
)
from sagellm.core.runtime import Clock, Randomness, SystemClock, VirtualClock
from sagellm.core.testing.schedule_simulation import Limits, ScheduleSimulation, check_plan
from sagellm.core.testing.schedule_states import (
    State,
    copy_state,
    decoding_request,
    random_state,
    waiting_request,
)
from sagellm.core.tokens import TokenIds


def _values(request: ScheduleRequest) -> dict[str, Any]:
    names = (field.name for field in fields(ScheduleRequest))
    return {name: getattr(request, name) for name in names if name != "last_scheduled_step"}


def _summary(plan: SchedulePlan) -> tuple[object, ...]:
    return (
        [(entry.request_id, entry.num_tokens, entry.num_new_blocks) for entry in plan.scheduled_requests],
        [request.request_id for request in plan.preempted_requests],
        (plan.num_admitted, plan.num_deferred, plan.deferred_reason),
    )


class SchedulerPlanContract(ABC):
    """What holds of every plan. Override `make`."""

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
        """Ask for one plan."""
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

    def test_planning_writes_nothing_but_the_step_of_a_turn(self) -> None:
        """The requests belong to the engine, which alone carries plans out."""
        rng = Randomness(1).stream("states")
        for _ in range(50):
            pending, running, limits = random_state(rng)
            before = [_values(request) for request in (*pending, *running)]
            self.plan(self.make_for(limits), (pending, running, limits))
            assert [_values(request) for request in (*pending, *running)] == before

    def test_equal_histories_give_equal_plans_and_instances_share_nothing(self) -> None:
        """A third scheduler that plans other states in between changes nothing for two that agree."""
        rng = Randomness(2).stream("states")
        _, _, limits = random_state(rng)
        first, second, third = (self.make_for(limits) for _ in range(3))
        for _ in range(50):
            pending, running, _ = random_state(rng)
            state = (pending, running, limits)
            again = copy_state(state)
            plan = self.plan(first, state)
            self.plan(third, random_state(rng))
            assert _summary(plan) == _summary(self.plan(second, again))

    def test_metrics_are_a_copy(self) -> None:
        """Whoever reads the counts cannot change them."""
        limits = Limits(max_num_batched_tokens=8, max_num_seqs=2, block_size=16, available_memory=4)
        scheduler = self.make_for(limits)
        before = scheduler.metrics()
        assert isinstance(before, SchedulerMetrics)
        before.num_steps += 5
        assert scheduler.metrics().num_steps == before.num_steps - 5


class SchedulerContract(SchedulerPlanContract):
    """What holds of every scheduler that makes progress. Override `make`."""

    num_seeds = 100
    max_schedule_ns = 2_000_000  # for 32 running requests that decode, 1,000 waiting

    @pytest.mark.parametrize("part", range(10))
    def test_every_request_ends_under_random_load(self, part: int) -> None:
        """Plans fit, blocks balance, everyone gets a turn within a bound, nobody starves."""
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
        turns = [self.plan(scheduler, ([], running, limits)) for _ in range(num_running)]
        ids = [entry.request_id for turn in turns for entry in turn.scheduled_requests]
        assert sorted(ids) == sorted([request.request_id for request in running] * budget)

    def test_the_probe_is_asked_before_a_request_is_admitted(self) -> None:
        """What it writes decides how much is computed."""

        def probe(request: ScheduleRequest) -> None:
            request.prefix_cache_hit, request.kv_blocks_needed = 32, 1

        scheduler = self.make(
            max_num_batched_tokens=64, max_num_seqs=2, block_size=16, probe=probe, clock=VirtualClock()
        )
        request = ScheduleRequest(RequestId("a"), TokenIds(bytes(4 * 40)), 8)
        plan = scheduler.schedule(pending_requests=[request], running_requests=[], available_memory=1)
        assert _summary(plan) == ([("a", 8, 1)], [], (1, 0, None))

    def test_negative_memory_is_refused(self) -> None:
        """It would be an engine's mistake."""
        limits = Limits(max_num_batched_tokens=8, max_num_seqs=2, block_size=16, available_memory=-1)
        with pytest.raises(InvalidInputError, match="-1"):
            self.plan(self.make_for(limits), ([], [], limits))

    def test_the_null_pass_changes_no_plan(self) -> None:
        """The pipeline itself decides nothing."""
        rng = Randomness(3).stream("states")
        for _ in range(100):
            state = random_state(rng)
            again = copy_state(state)
            piped = self.make_for(state[2])
            piped.add_optimization_pass(NullSchedulerPass())
            assert _summary(self.plan(piped, again)) == _summary(self.plan(self.make_for(state[2]), state))

    @pytest.mark.parametrize("part", ["pending", "running"])
    @pytest.mark.parametrize("fault", ["loses", "doubles", "invents", "replaces"])
    def test_a_pass_that_changes_the_set_of_requests_is_named(self, part: str, fault: str) -> None:
        """Both by `apply_pass` and in a step."""
        limits = Limits(max_num_batched_tokens=8, max_num_seqs=4, block_size=16, available_memory=9)
        state = ([waiting_request(Random(0), "p")], [decoding_request("r")], limits)
        ir = ScheduleIR(
            pending=tuple(state[0]),
            running=tuple(state[1]),
            available_memory=9,
            max_num_batched_tokens=8,
            max_num_seqs=4,
            block_size=16,
        )
        scheduler = self.make_for(limits)
        with pytest.raises(EngineError, match="faulty"):
            scheduler.apply_pass(_FaultyPass(part, fault), ir)
        scheduler.add_optimization_pass(_FaultyPass(part, fault))
        with pytest.raises(EngineError, match="faulty"):
            self.plan(scheduler, state)

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
        assert metrics.num_scheduled_tokens == sum(plan.num_tokens for plan in plans)
        assert metrics.num_admitted == sum(plan.num_admitted for plan in plans)
        assert metrics.num_preempted == sum(len(plan.preempted_requests) for plan in plans)
        assert metrics.num_idle_steps == sum(not plan.scheduled_requests for plan in plans)

    def test_a_decode_step_keeps_its_cost_budget(self) -> None:
        """Generous: it catches work for each waiting request, not a slow machine."""
        limits = Limits(max_num_batched_tokens=64, max_num_seqs=32, block_size=16, available_memory=500)
        scheduler = self.make_for(limits, SystemClock())
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
        assert 0 < statistics.median(costs) < self.max_schedule_ns


@dataclass(frozen=True)
class _FaultyPass(SchedulerPassProtocol):
    part: str
    fault: str

    @property
    def name(self) -> str:
        return "faulty"

    def run(self, ir: ScheduleIR) -> ScheduleIR:
        old: tuple[ScheduleRequest, ...] = getattr(ir, self.part)
        new = {
            "loses": old[1:],
            "doubles": old * 2,
            "invents": (*old, decoding_request("new")),
            "replaces": (copy.copy(old[0]), *old[1:]),
        }[self.fault]
        return replace(ir, **{self.part: new})  # type: ignore[arg-type]
