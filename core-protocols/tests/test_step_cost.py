"""What a step is predicted to take, and how many tokens fit a time."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from sagellm.core import InvalidInputError, StepCost, StepWork

COST = StepCost(base_ns=1e6, token_ns=1000, seq_ns=500, kv_token_ns=10, pair_ns=2)
coefficients = st.just(0.0) | st.floats(1e-6, 1e6)
pair_costs = st.just(0.0) | st.floats(1e-6, 10)


def work_of(start: int, num_tokens: int) -> StepWork:
    """One row that computes tokens after its first `start`."""
    end = start + num_tokens
    return StepWork(num_tokens, 1, end, num_tokens * (start + end) // 2)


def test_a_step_takes_the_sum_of_its_amounts() -> None:
    assert COST.predict_ns(StepWork(3, 2, 100, 50)) == 1e6 + 3000 + 1000 + 1000 + 100
    assert StepCost().predict_ns(StepWork(3, 2, 100, 50)) == 0


@given(coefficients, coefficients, coefficients, pair_costs, st.integers(0, 5000), st.integers(0, 5000))
def test_the_tokens_that_fit_a_time_take_at_most_that_and_one_more_would_not(
    token_ns: float, seq_ns: float, kv_token_ns: float, pair_ns: float, start: int, num_tokens: int
) -> None:
    cost = StepCost(token_ns=token_ns, seq_ns=seq_ns, kv_token_ns=kv_token_ns, pair_ns=pair_ns)
    duration_ns = cost.predict_ns(work_of(start, num_tokens))
    fitting = cost.num_tokens_within(duration_ns, start)
    if fitting < 1 << 30:
        linear = kv_token_ns + token_ns + pair_ns * (start + fitting)
        assert cost.predict_ns(work_of(start, fitting)) <= duration_ns * (1 + 1e-9) + pair_ns
        assert (
            cost.predict_ns(work_of(start, fitting + 1)) >= duration_ns * (1 - 1e-9) - pair_ns - linear * 1e-6
        )


def test_no_token_fits_no_time_and_any_number_what_costs_nothing() -> None:
    assert COST.num_tokens_within(0, 0) == 0
    assert COST.num_tokens_within(-5.0, 0) == 0
    assert COST.num_tokens_within(500 + 10 * 99, 100) == 0  # the KV of the first 100 alone takes longer
    assert StepCost(base_ns=5).num_tokens_within(1, 0) == 1 << 30


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["base_ns", "token_ns", "seq_ns", "kv_token_ns", "pair_ns"])
def test_a_coefficient_is_a_number_of_at_least_0(name: str, value: float) -> None:
    with pytest.raises(InvalidInputError, match=f"{name} is {value}"):
        StepCost(**{name: value})


def test_a_cost_is_read_from_a_mapping() -> None:
    assert StepCost.of({"base_ns": 5, "pair_ns": 2.5}) == StepCost(base_ns=5.0, pair_ns=2.5)
    with pytest.raises(InvalidInputError, match="a step cost has no 'layer_ns'; it has base_ns, kv_token_ns"):
        StepCost.of({"layer_ns": 1})
