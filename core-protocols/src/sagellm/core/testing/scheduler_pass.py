"""What every scheduler pass must do, as a test class to subclass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import is_dataclass
from random import Random

import pytest

from sagellm.core.protocols.scheduler_ir import SchedulerPassProtocol
from sagellm.core.testing.schedule_states import random_ir, waiting_request


class SchedulerPassContract(ABC):
    """What holds of every pass. Override `make`."""

    starvation_rounds = 2_000

    @abstractmethod
    def make(self) -> SchedulerPassProtocol:
        """Return a new pass."""

    @pytest.mark.parametrize("seed", range(20))
    def test_a_pass_keeps_the_requests_and_raises_no_limit(self, seed: int) -> None:
        """It reorders and annotates; what it was given stays as it was."""
        optimization_pass = self.make()
        ir = random_ir(seed)
        text, annotations = ir.to_text(), dict(ir.annotations)
        result = optimization_pass.run(ir)
        assert (ir.to_text(), ir.annotations) == (text, annotations)
        for part in ("pending", "running"):
            assert sorted(map(id, getattr(result, part))) == sorted(map(id, getattr(ir, part)))
        for limit in ("available_memory", "max_num_batched_tokens", "max_num_seqs"):
            assert 0 <= getattr(result, limit) <= getattr(ir, limit)
        assert result.block_size == ir.block_size

    def test_equal_schedules_give_equal_results(self) -> None:
        """A pass keeps no state that would make a replay differ."""
        for seed in range(20):
            assert self.make().run(random_ir(seed)).to_text() == self.make().run(random_ir(seed)).to_text()

    def test_a_pass_is_a_frozen_dataclass_with_a_name(self) -> None:
        """Its fields are its options, so that a pipeline can be printed and compared."""
        optimization_pass = self.make()
        assert optimization_pass.name
        assert is_dataclass(optimization_pass)
        assert optimization_pass == self.make()
        assert hash(optimization_pass) == hash(self.make())

    def test_nobody_waits_for_ever_while_others_arrive(self) -> None:
        """One admission a round and one arrival a round: the old request comes first in the end."""
        optimization_pass, rng = self.make(), Random(4)
        base = random_ir(0)
        old = waiting_request(rng, "old")
        old.priority, old.arrived_time = -1, 0.0
        pending = [old]
        for number in range(self.starvation_rounds):
            arrival = waiting_request(rng, f"new{number}")
            arrival.priority, arrival.arrived_time = 2, float(number)
            pending.append(arrival)
            order = optimization_pass.run(base.with_pending(pending)).pending
            pending = list(order[1:])
            if order[0] is old:
                return
        pytest.fail(f"{optimization_pass.name} kept a request waiting for {self.starvation_rounds} rounds")
