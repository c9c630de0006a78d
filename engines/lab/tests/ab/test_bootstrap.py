"""Intervals of paired differences: their error is that of resampled blocks, and they hold the truth."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import t as student

from sagellm.core import TraceRequest
from sagellm.lab.ab.bootstrap import (
    MIN_SESSIONS,
    BlockBootstrap,
    Estimate,
    num_requests_for,
    sessions_of,
    student_t,
)

ONES = np.ones(400)

CORRECTED = (10 / 9) ** 0.5
"""Blocks of a tenth differ from the mean of all by so much less than from the truth."""


def alone(num: int = 400, **settings: float) -> BlockBootstrap:
    """Return a bootstrap of requests of which each is its own session."""
    return BlockBootstrap(np.arange(num), **settings)


def drawn_sums(bootstrap: BlockBootstrap, values: np.ndarray, num: int) -> np.ndarray:
    """Return the sums of resamples of whole blocks, drawn one by one."""
    random, length, total = np.random.default_rng(5), bootstrap.block_len, bootstrap.num_sessions
    starts = random.integers(0, total, (num, bootstrap.num_blocks))
    places = (starts[:, :, None] + np.arange(length)) % total
    return values[places].sum(axis=(1, 2))


def test_sessions_are_numbered_by_their_first_request():
    given = [("a", "x"), ("", ""), ("b", "x"), ("a", "x"), ("", "")]
    requests = [
        TraceRequest(float(i), 8, 1, tenant=tenant, conversation=name)
        for i, (tenant, name) in enumerate(given)
    ]
    assert sessions_of(requests).tolist() == [0, 1, 2, 0, 3]


def test_the_error_of_a_mean_is_that_of_resamples():
    random = np.random.default_rng(1)
    a = random.exponential(1.0, 400)
    b = a + np.repeat(random.normal(0.1, 0.3, 40), 10)  # neighbours differ alike
    bootstrap = alone()
    estimate = bootstrap.means(a, b, ONES).absolute
    drawn = drawn_sums(bootstrap, b - a, 4000) / 400
    assert estimate.value == pytest.approx((b - a).mean())
    assert estimate.standard_error == pytest.approx(CORRECTED * drawn.std(), rel=0.04)
    naive = (b - a).std() / 20
    assert estimate.standard_error > 2 * naive


def test_the_error_of_a_percentile_is_that_of_resamples():
    random = np.random.default_rng(2)
    a, b = random.exponential(1.0, 400), random.exponential(1.2, 400)
    bootstrap = alone()
    found = bootstrap.percentiles(a, b, 90)
    random, errors = np.random.default_rng(7), []
    for _ in range(1500):
        starts = random.integers(0, 400, bootstrap.num_blocks)
        places = ((starts[:, None] + np.arange(bootstrap.block_len)) % 400).ravel()
        errors.append(np.percentile(b[places], 90) - np.percentile(a[places], 90))
    assert found.absolute.value == pytest.approx(np.percentile(b, 90) - np.percentile(a, 90))
    assert found.absolute.standard_error == pytest.approx(CORRECTED * np.std(errors), rel=0.06)


def test_requests_without_a_value_count_in_no_percentile():
    a = np.arange(100.0)
    a[::2] = np.nan
    found = alone(100).percentiles(a, a + 5, 50)
    assert (found.absolute.value, found.absolute.standard_error) == (5.0, 0.0)


def test_a_relative_difference_is_one_of_logarithms():
    random = np.random.default_rng(3)
    a = random.exponential(1.0, 400)
    found = alone().means(a, 1.02 * a, ONES)
    assert found.relative.value == pytest.approx(0.02)
    assert found.relative.high - found.relative.low < 1e-9, "every request is 2 % slower"
    assert found.relative.is_clear
    assert found.absolute.high - found.absolute.low > 0.002, "but not by as many seconds"
    assert alone().means(np.zeros(400), a, ONES).relative is None


def test_requests_of_a_session_are_drawn_together():
    random = np.random.default_rng(4)
    noise, ones = np.repeat(random.normal(0, 1, 900), 4), np.ones(3600)
    together = BlockBootstrap(np.repeat(np.arange(900), 4)).means(ones, ones + noise, ones).absolute
    assert together.standard_error == pytest.approx(noise.std() / 30, rel=0.3), "60 if each is drawn alone"


def test_an_interval_holds_the_truth_in_95_of_100():
    random, held = np.random.default_rng(6), 0
    for _ in range(400):
        a = random.exponential(1.0, 200)
        kept = np.convolve(random.normal(0, 1, 204), np.ones(5) / 5, "valid")  # neighbours are alike
        found = alone(200).means(a, a + kept, np.ones(200)).absolute
        held += found.low <= 0 <= found.high
    assert 0.93 <= held / 400 <= 0.99


def test_equal_runs_differ_by_nothing():
    a = np.random.default_rng(8).exponential(1.0, 400)
    for found in (alone().means(a, a, ONES), alone().percentiles(a, a, 99)):
        for each in (found.absolute, found.relative):
            assert (each.value, each.low, each.high, each.is_clear) == (0, 0, 0, False)


def test_a_higher_level_gives_a_wider_interval():
    random = np.random.default_rng(9)
    a, b = random.exponential(1.0, 400), random.exponential(1.0, 400)
    wide, narrow = (alone(level=level).means(a, b, ONES).absolute for level in (0.99, 0.95))
    assert wide.high - wide.low > narrow.high - narrow.low


def test_few_sessions_have_no_interval():
    few, ones = alone(MIN_SESSIONS - 1), np.ones(MIN_SESSIONS - 1)
    assert few.means(ones, ones, ones).absolute is None
    assert few.percentiles(ones, ones, 99).absolute is None
    enough, ones = alone(MIN_SESSIONS), np.ones(MIN_SESSIONS)
    assert (enough.block_len, enough.num_blocks) == (2, 10)
    assert enough.means(ones, ones, ones).absolute is not None


@pytest.mark.parametrize("freedom", [3, 4, 9, 40, 300])
@pytest.mark.parametrize("level", [0.9, 0.95, 0.99])
def test_factors_are_those_of_students_t(freedom, level):
    assert student_t(level, freedom) == pytest.approx(student.ppf((1 + level) / 2, freedom), rel=0.02)


def test_half_the_difference_needs_four_times_the_requests():
    estimate = Estimate(value=0.01, low=-0.01, high=0.03, standard_error=0.01)
    needed = num_requests_for(0.02, estimate, 1000)
    assert num_requests_for(0.01, estimate, 1000) == pytest.approx(4 * needed, abs=4)
    assert needed == pytest.approx(1000 * ((2.262 + 0.842) * 0.01 / 0.02) ** 2, rel=0.01)
