"""The cost of steps, fitted to steps of a known cost with noise and outliers."""

from __future__ import annotations

from dataclasses import asdict
from random import Random

import numpy as np
import pytest

from sagellm.core import StepCost, StepWork
from sagellm.engines.engine_core.step_cost_fit import FIRST_STEPS, REFIT_STEPS, StepCostFit, fit_step_cost

TRUE = StepCost(base_ns=5e6, token_ns=2e5, seq_ns=1e5, kv_token_ns=300, pair_ns=20)


def work(rng: Random) -> StepWork:
    """Decodes at several contexts, and sometimes a chunk of a prompt beside them."""
    starts = [rng.randint(10, 4000) for _ in range(rng.randint(1, 32))]
    rows = [(start, 1) for start in starts]
    if rng.random() < 0.5:
        rows.append((rng.randint(0, 2000), rng.randint(2, 512)))
    return StepWork(
        sum(num for _, num in rows),
        len(rows),
        sum(start + num for start, num in rows),
        sum(num * (2 * start + num) // 2 for start, num in rows),
    )


def measured(rng: Random, noise: float = 0.0, outliers: float = 0.0) -> tuple[StepWork, int]:
    done = work(rng)
    factor = 1 + rng.uniform(-noise, noise)
    if rng.random() < outliers:
        factor *= rng.uniform(3, 20)
    return done, round(TRUE.predict_ns(done) * factor)


def largest_error(cost: StepCost, seed: int = 99) -> float:
    """The largest relative error of predictions over other steps."""
    rng = Random(seed)
    others = [work(rng) for _ in range(200)]
    return max(abs(cost.predict_ns(each) / TRUE.predict_ns(each) - 1) for each in others)


def test_known_coefficients_are_recovered() -> None:
    rng = Random(1)
    found = fit_step_cost([measured(rng) for _ in range(300)])
    for name, value in asdict(TRUE).items():
        assert getattr(found, name) == pytest.approx(value, rel=0.1), name
    assert largest_error(found) < 0.01


@pytest.mark.parametrize("seed", range(5))
def test_noise_and_outliers_hardly_move_a_fit_of_recorded_steps(seed: int) -> None:
    rng = Random(seed)
    found = fit_step_cost([measured(rng, noise=0.1, outliers=0.05) for _ in range(500)])
    assert largest_error(found) < 0.08


@pytest.mark.parametrize("seed", range(5))
def test_noise_and_outliers_hardly_move_a_running_fit(seed: int) -> None:
    rng, fit = Random(seed), StepCostFit()
    for _ in range(1500):
        fit.add(*measured(rng, noise=0.1, outliers=0.02))
    assert fit.cost is not None
    assert largest_error(fit.cost) < 0.15


def test_a_running_fit_begins_after_the_first_steps_and_is_renewed_later() -> None:
    rng, fit = Random(2), StepCostFit()
    for _ in range(FIRST_STEPS - 1):
        fit.add(*measured(rng))
    assert fit.cost is None
    fit.add(*measured(rng))
    first = fit.cost
    assert first is not None
    for _ in range(REFIT_STEPS - 1):
        fit.add(*measured(rng))
    assert fit.cost is first
    fit.add(*measured(rng))
    assert fit.cost is not first


def test_a_running_fit_follows_a_machine_that_becomes_slower() -> None:
    rng, fit = Random(3), StepCostFit()
    for _ in range(600):
        fit.add(*measured(rng, noise=0.05))
    for _ in range(6000):
        done, took_ns = measured(rng, noise=0.05)
        fit.add(done, 2 * took_ns)
    assert fit.cost is not None
    assert fit.cost.predict_ns(work(Random(4))) == pytest.approx(
        2 * TRUE.predict_ns(work(Random(4))), rel=0.1
    )


@pytest.mark.parametrize("seed", range(20))
def test_no_coefficient_is_ever_negative(seed: int) -> None:
    rng, fit = Random(seed), StepCostFit()
    steps = [(work(rng), rng.randint(1, 10**9)) for _ in range(200)]  # of no cost at all
    for done, took_ns in steps:
        fit.add(done, took_ns)
    for cost in (fit.cost, fit_step_cost(steps)):
        assert cost is not None
        assert min(asdict(cost).values()) >= 0
        assert np.isfinite(list(asdict(cost).values())).all()


def test_amounts_that_never_vary_alone_share_what_they_cost() -> None:
    """One decode at one context, again and again: its time is known, but not what it is made of."""
    done, took_ns = StepWork(1, 1, 100, 100), 7_000_000
    assert fit_step_cost([(done, took_ns)] * 50).predict_ns(done) == pytest.approx(took_ns, rel=1e-3)
    fit = StepCostFit()
    for _ in range(100):
        fit.add(done, took_ns)
    assert fit.cost is not None
    assert fit.cost.predict_ns(done) == pytest.approx(took_ns, rel=1e-3)


def test_an_amount_that_is_always_0_costs_nothing() -> None:
    rng = Random(5)
    steps = [
        (StepWork(num, 1, 0, 0), round(5e6 + 1000 * num)) for num in (rng.randint(1, 500) for _ in range(50))
    ]
    found = fit_step_cost(steps)
    assert (found.kv_token_ns, found.pair_ns) == (0, 0)
    assert found.token_ns == pytest.approx(1000, rel=0.05)


def test_steps_without_work_or_time_do_not_count() -> None:
    fit = StepCostFit()
    for _ in range(100):
        fit.add(StepWork(0, 0, 0, 0), 1000)
        fit.add(StepWork(1, 1, 1, 1), 0)
    assert fit.cost is None
    with pytest.raises(ValueError, match="there are no steps to fit"):
        fit_step_cost([])
