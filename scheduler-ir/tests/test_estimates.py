"""What passes estimate agrees with the cost model of a step."""

from __future__ import annotations

import numpy as np
import pytest

from sagellm.core import StepCost, StepWork
from sagellm.kvmgr.scheduler_ir.passes.estimates import decode_ns, prefill_ns

COST = StepCost(base_ns=1e6, token_ns=2e5, seq_ns=1e5, kv_token_ns=300, pair_ns=20, prefill_ns=7e5)


@pytest.mark.parametrize(("start", "num_tokens"), [(0, 1), (0, 100), (64, 1), (64, 100)])
def test_a_prefill_takes_what_a_step_of_it_alone_does_without_its_base(start: int, num_tokens: int) -> None:
    starts, counts = np.array([start], np.int32), np.array([num_tokens], np.int32)
    expected = COST.predict_ns(StepWork.of(starts, counts)) - COST.base_ns
    assert prefill_ns(COST, starts, counts).tolist() == [pytest.approx(expected, rel=1e-4)]


def test_a_decode_takes_its_share_of_the_base() -> None:
    alone = COST.predict_ns(StepWork(1, 1, 50, 50))
    assert decode_ns(COST, np.array([50]), 1).tolist() == [alone]
    assert decode_ns(COST, np.array([50]), 4).tolist() == [alone - 0.75 * COST.base_ns]
