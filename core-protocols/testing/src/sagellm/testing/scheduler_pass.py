"""What every scheduler pass must do, as a test class to subclass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass, replace
from functools import cache
from random import Random
from typing import Any, cast

import pytest

from sagellm.core.errors import UnknownProviderError
from sagellm.core.ids import RequestId
from sagellm.core.plugins.registry import PluginRegistry
from sagellm.core.protocols.request_rows import RequestRows, ScheduleRequest
from sagellm.core.protocols.scheduler_ir import (
    Admission,
    Part,
    ScheduleIR,
    SchedulePlan,
    SchedulerIRProtocol,
    SchedulerPassProtocol,
)
from sagellm.core.tenant import Tenant
from sagellm.core.tokens import TokenIds
from sagellm.testing.schedule_states import decoding_request, random_ir, waiting_request

UNWELCOME = ScheduleRequest(
    request_id=RequestId("old"),
    token_ids=TokenIds(bytes(4 * 200)),
    max_tokens=1000,
    priority=-1,
    predicted_remaining_tokens=900.0,
    confidence=1.0,
)
"""Whatever a pass prefers, this request has little of it but age."""


def _welcome(name: str, arrived: int, priority: int, tenant: Tenant) -> ScheduleRequest:
    """Make a request that is short, cached and due."""
    return ScheduleRequest(
        request_id=RequestId(name),
        token_ids=TokenIds(bytes(4 * 20)),
        max_tokens=4,
        priority=priority,
        arrived_time=float(arrived),
        prefix_cache_hit=16,
        num_tokens=21,
        predicted_remaining_tokens=1.0,
        confidence=1.0,
        deadline=arrived + 5.0,
        tenant=tenant,
    )


def _orders(ir: ScheduleIR, part: Part) -> bool:
    return any((each.kind, each.target) == ("order", part) for each in ir.decisions)


def _plan_of(ir: ScheduleIR) -> SchedulePlan:
    """Return a plan in which the first waiting request and all running ones that can compute one token."""
    import numpy as np

    rows = np.array([row for row in range(len(ir.running)) if row not in ir.preempted], np.int32)
    rows = rows[ir.running.num_missing[rows] > 0]
    admitted = [row for row in ir.admission.tolist() if row not in ir.deferred][:1]
    return SchedulePlan(
        pending=ir.pending,
        running=ir.running,
        step=ir.step,
        rows=rows,
        num_tokens=np.ones(len(rows), np.int32),
        num_new_blocks=np.zeros(len(rows), np.int32),
        admitted=[Admission(row, 1, 1, 0) for row in admitted],
        preempted=[*ir.preempted],
        decisions=ir.decisions,
    )


_SCHEDULER = "sagellm-scheduler-ir"


@cache
def _scheduler() -> SchedulerIRProtocol:
    """Return the scheduler that runs passes here, and verifies what they decide: the engine's default.

    It is loaded even where only the plugins of the distribution under test are.
    """
    registry = PluginRegistry.load({"SAGELLM_PLUGINS_ALLOW": _SCHEDULER})
    try:
        factory: Any = registry.resolve("scheduler", "base")
    except UnknownProviderError as error:
        told = f"the scheduler 'base' runs the passes that are tested; pip install {_SCHEDULER}"
        raise UnknownProviderError(told) from error
    return cast(SchedulerIRProtocol, factory())


class SchedulerPassContract(ABC):
    """What holds for every pass. Override `make`."""

    starvation_rounds = 2_000  # a second each

    @abstractmethod
    def make(self) -> SchedulerPassProtocol:
        """Return a new pass."""

    def texts(self, seeds: range) -> Iterator[str]:
        """Yield a new pass's decisions on a history of random schedules, as text."""
        optimization_pass = self.make()
        state = optimization_pass.start()
        for seed in seeds:
            ir = self.run(optimization_pass, random_ir(seed), state)
            yield _text(ir)
            optimization_pass.observe(_plan_of(ir), state)

    def run(self, optimization_pass: SchedulerPassProtocol, ir: ScheduleIR, state: Any) -> ScheduleIR:
        """Run a pass once, and verify what it decides as the scheduler `base` does."""
        return _scheduler().apply_pass(optimization_pass, replace(ir, state=state))

    @pytest.mark.parametrize("seed", range(20))
    def test_a_pass_decides_what_it_may_and_writes_to_nothing(self, seed: int) -> None:
        """It keeps every request, raises no limit, and does not change its input."""
        ir, again = random_ir(seed), random_ir(seed)
        optimization_pass = self.make()
        self.run(optimization_pass, ir, optimization_pass.start())
        assert _text(ir) == _text(again)
        assert ([*ir.pending], [*ir.running]) == ([*again.pending], [*again.running])

    def test_equal_histories_give_equal_decisions(self) -> None:
        """A pass keeps nothing outside its state that would make a replay differ."""
        assert list(self.texts(range(20))) == list(self.texts(range(20)))

    def test_a_pass_that_rests_would_decide_nothing_in_calm_steps(self) -> None:
        """As long as nobody can be admitted, no prompt runs and blocks suffice, whoever runs and waits."""
        optimization_pass = self.make()
        state = optimization_pass.start()
        for seed in range(20):
            base = random_ir(seed)
            optimization_pass.observe(_plan_of(self.run(optimization_pass, base, state)), state)
            rows = [
                replace(decoding_request(f"d{i}"), tenant=row.tenant, priority=row.priority)
                for i, row in enumerate(base.running)
            ]
            for pending in (base.pending, base.pending[:0]):
                calm = replace(base, pending=pending, running=RequestRows.of(rows), max_num_seqs=len(rows))
                self._check_calm(optimization_pass, replace(calm, available_memory=1000), state)

    def _check_calm(self, optimization_pass: SchedulerPassProtocol, calm: ScheduleIR, state: Any) -> None:
        assert calm.is_calm
        rests = False
        for second in range(4):
            ir = self.run(optimization_pass, replace(calm, now=calm.now + second), state)
            decided = [each for each in ir.decisions if len(each.rows) or each.kind == "lower"]
            assert not (rests and decided), "it said that it rests, and decided in a calm step"
            optimization_pass.observe(_plan_of(ir), state)
            rests = optimization_pass.rests(state)
            assert rests in (True, False)

    def test_a_pass_is_a_frozen_dataclass_with_a_name(self) -> None:
        """Its fields are its options, so that a pipeline can be printed and compared."""
        optimization_pass = self.make()
        assert optimization_pass.name
        assert is_dataclass(optimization_pass)
        assert optimization_pass == self.make()
        assert hash(optimization_pass) == hash(self.make())

    def test_nobody_waits_for_ever_while_others_arrive(self) -> None:
        """With one admission and one arrival per round, the old request is admitted in the end."""
        optimization_pass, rng = self.make(), Random(4)
        state, base = optimization_pass.start(), random_ir(0)
        pending = [replace(waiting_request(rng, "old"), priority=-1, arrived_time=0.0)]
        for number in range(self.starvation_rounds):
            arrival = waiting_request(rng, f"new{number}")
            pending.append(replace(arrival, priority=2, arrived_time=float(number)))
            ir = replace(base, pending=RequestRows.of(pending), step=number, now=float(number))
            ir = self.run(optimization_pass, ir, state)
            admitted = [row for row in ir.admission.tolist() if row not in ir.deferred]
            fits = min(ir.max_num_batched_tokens, ir.max_num_seqs, ir.available_memory) > 0
            if admitted and fits and pending.pop(admitted[0]).request_id == "old":
                return
        pytest.fail(f"{optimization_pass.name} kept a request waiting for {self.starvation_rounds} rounds")

    def test_a_request_that_a_pass_puts_behind_comes_first_in_the_end(self) -> None:
        """Rows come by priority, as from the engine. Newer ones that a pass ranks higher keep coming."""

        def last_round(priority: int, tenant: Tenant) -> tuple[bool, bool]:
            optimization_pass, state, base = self.make(), self.make().start(), random_ir(0)
            is_ordered = False
            for number in range(self.starvation_rounds):
                new = [_welcome(f"{name}{number}", number, priority, tenant) for name in "ab"]
                rows = [*new, UNWELCOME] if priority > UNWELCOME.priority else [UNWELCOME, *new]
                ir = replace(base, pending=RequestRows.of(rows), running=base.running[:0])
                ir = self.run(optimization_pass, replace(ir, step=number, now=float(number)), state)
                optimization_pass.observe(_plan_of(ir), state)
                is_ordered |= _orders(ir, "pending")
                old = rows.index(UNWELCOME)
                is_first = ir.admission[0] == old and old not in ir.deferred
                if is_first and is_ordered:
                    break
            return is_ordered, is_first

        self._check_all(last_round)

    def test_nobody_is_the_first_victim_forever(self) -> None:
        """If a pass orders preemption, even a request with little but age is spared in the end."""

        def last_round(priority: int, tenant: Tenant) -> tuple[bool, bool]:
            optimization_pass, state, base = self.make(), self.make().start(), random_ir(0)
            is_ordered = False
            for number in range(self.starvation_rounds):
                new = _welcome(f"new{number}", number, priority, tenant)
                rows = [replace(UNWELCOME, num_computed_tokens=1, num_blocks=1)]
                rows.append(replace(new, num_computed_tokens=20, num_blocks=3))
                ir = replace(base, pending=base.pending[:0], running=RequestRows.of(rows), available_memory=0)
                ir = self.run(optimization_pass, replace(ir, step=number, now=float(number)), state)
                optimization_pass.observe(_plan_of(ir), state)
                is_ordered |= _orders(ir, "running")
                is_spared = ir.preemption[-1] == 1 and 0 not in ir.preempted
                if is_spared and is_ordered:
                    break
            return is_ordered, is_spared

        self._check_all(last_round)

    def _check_all(self, last_round: Callable[[int, Tenant], tuple[bool, bool]]) -> None:
        """Check passes that order, with newcomers of the old request's tenant and of another.

        They are more urgent than the old request, or as urgent.
        """
        for tenant in (UNWELCOME.tenant, Tenant("newcomers")):
            rounds = [last_round(priority, tenant) for priority in (2, UNWELCOME.priority)]
            is_ordered = any(ordered for ordered, _ in rounds)
            assert not is_ordered or all(is_right for _, is_right in rounds), (
                f"{self.make().name} puts a request last for {self.starvation_rounds} seconds: "
                "let age bring it forward (ir.now - ir.pending.arrived_time)"
            )

    def test_nobody_is_preempted_for_ever(self) -> None:
        """A request that holds the only seat while others wait has a step without preemption in the end."""
        optimization_pass, rng = self.make(), Random(5)
        state, base = optimization_pass.start(), replace(random_ir(0), max_num_seqs=1)
        running = RequestRows.of([replace(decoding_request("old"), priority=-1)])
        for number in range(self.starvation_rounds):
            waiting = replace(waiting_request(rng, f"new{number}"), priority=2, arrived_time=float(number))
            pending = RequestRows.of([waiting])
            ir = replace(base, pending=pending, running=running, step=number, now=float(number))
            ir = self.run(optimization_pass, ir, state)
            if not ir.preempted and ir.max_num_batched_tokens > 0:
                return
        pytest.fail(
            f"{optimization_pass.name} preempted a request in each of {self.starvation_rounds} rounds"
        )


def _text(ir: ScheduleIR) -> str:
    limits = ir.available_memory, ir.max_num_batched_tokens, ir.max_num_seqs
    return "\n".join([str(limits), *map(str, ir.decisions)])
