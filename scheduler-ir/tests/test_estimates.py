"""What passes estimate agrees with the cost model of a step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from sagellm.core import StepCost, StepWork
from sagellm.kvmgr.scheduler_ir.passes.estimates import decode_ns, num_tokens_within, prefill_ns

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


LINEAR = StepCost(base_ns=1e6, token_ns=1000, seq_ns=500, kv_token_ns=10, pair_ns=2)
coefficients = st.just(0.0) | st.floats(1e-6, 1e6)
pair_costs = st.just(0.0) | st.floats(1e-6, 10)


def work_of(start: int, num_tokens: int) -> StepWork:
    """One row that computes tokens after its first `start`."""
    end = start + num_tokens
    return StepWork(num_tokens, 1, end, num_tokens * (start + end) // 2)


@given(coefficients, coefficients, coefficients, pair_costs, st.integers(0, 5000), st.integers(0, 5000))
def test_the_tokens_that_fit_a_time_take_at_most_that_and_one_more_would_not(
    token_ns: float, seq_ns: float, kv_token_ns: float, pair_ns: float, start: int, num_tokens: int
) -> None:
    cost = StepCost(token_ns=token_ns, seq_ns=seq_ns, kv_token_ns=kv_token_ns, pair_ns=pair_ns)
    duration_ns = cost.predict_ns(work_of(start, num_tokens))
    fitting = num_tokens_within(cost, duration_ns, start)
    if fitting < 1 << 30:
        linear = kv_token_ns + token_ns + pair_ns * (start + fitting)
        assert cost.predict_ns(work_of(start, fitting)) <= duration_ns * (1 + 1e-9) + pair_ns
        assert (
            cost.predict_ns(work_of(start, fitting + 1)) >= duration_ns * (1 - 1e-9) - pair_ns - linear * 1e-6
        )


def test_no_token_fits_no_time_and_any_number_what_costs_nothing() -> None:
    assert num_tokens_within(LINEAR, 0, 0) == 0
    assert num_tokens_within(LINEAR, -5.0, 0) == 0
    assert num_tokens_within(LINEAR, 500 + 10 * 99, 100) == 0  # the KV of the first 100 alone takes longer
    assert num_tokens_within(StepCost(base_ns=5), 1, 0) == 1 << 30
