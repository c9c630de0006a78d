"""What a step is predicted to take."""

from __future__ import annotations

import pytest

from sagellm.core import InvalidInputError, StepCost, StepWork

COST = StepCost(base_ns=1e6, token_ns=1000, seq_ns=500, kv_token_ns=10, pair_ns=2)


def test_a_step_takes_the_sum_of_its_amounts() -> None:
    assert COST.predict_ns(StepWork(3, 2, 100, 50)) == 1e6 + 3000 + 1000 + 1000 + 100
    assert StepCost().predict_ns(StepWork(3, 2, 100, 50)) == 0


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["base_ns", "token_ns", "seq_ns", "kv_token_ns", "pair_ns"])
def test_a_coefficient_is_a_number_of_at_least_0(name: str, value: float) -> None:
    with pytest.raises(InvalidInputError, match=f"{name} is {value}"):
        StepCost(**{name: value})


def test_a_cost_is_read_from_a_mapping() -> None:
    assert StepCost.of({"base_ns": 5, "pair_ns": 2.5}) == StepCost(base_ns=5.0, pair_ns=2.5)
    with pytest.raises(InvalidInputError, match="a step cost has no 'layer_ns'; it has base_ns, kv_token_ns"):
        StepCost.of({"layer_ns": 1})
