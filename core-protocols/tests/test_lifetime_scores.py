"""Predictions are scored alike, whoever made them."""

from __future__ import annotations

import math

import pytest

from sagellm.core import LifetimeMetrics, LifetimePrediction, PredictionRequest
from sagellm.core.lifetime_scores import (
    LifetimeScores,
    ScoredPrediction,
    predicted_length,
    rank_correlation,
    scored_prediction,
)

PREDICTED = [100.0, 52.0, 40.0, 7.0, 300.0, 12.5]
ACTUAL = [110, 50, 44, 10, 200, 12]  # errors of 10, 2, 4, 3, 100 and 0.5 tokens; the median is 47


def asked(*, current_length: int = 0, max_length: int = 1000) -> PredictionRequest:
    return PredictionRequest(
        sequence_id="a", token_ids=[1, 2], current_length=current_length, max_length=max_length
    )


def prediction(remaining: float, confidence: float = 0.5) -> LifetimePrediction:
    return LifetimePrediction(remaining_length=remaining, estimated_time=0.0, confidence=confidence)


def test_the_errors_are_those_that_the_metrics_define() -> None:
    scores = LifetimeScores()
    for guess, length in zip(PREDICTED, ACTUAL, strict=True):
        scores.end(ScoredPrediction(guess), actual_length=length, max_length=1000)
    metrics = scores.metrics()
    assert metrics.num_scored == 6
    assert metrics.mae_tokens == pytest.approx(119.5 / 6)
    assert metrics.median_mae_tokens == pytest.approx((63 + 3 + 3 + 37 + 153 + 35) / 6)
    assert metrics.within_10_percent == pytest.approx(4 / 6)
    assert metrics.within_10_percent_or_5_tokens == pytest.approx(5 / 6)


def test_a_sequence_that_its_limit_cut_counts_apart() -> None:
    scores = LifetimeScores()
    scores.end(ScoredPrediction(5.0), actual_length=10, max_length=10)
    scores.end(ScoredPrediction(5.0), actual_length=9, max_length=10)
    metrics = scores.metrics()
    assert (metrics.num_cut, metrics.num_scored, metrics.mae_tokens) == (1, 1, 4)


def test_without_a_prediction_nothing_is_scored() -> None:
    scores = LifetimeScores()
    scores.end(None, actual_length=9, max_length=10)
    assert scores.metrics() == LifetimeMetrics(num_predictions=0, num_updates=0)


@pytest.mark.parametrize("remaining", [math.nan, math.inf, -1.0])
def test_what_is_no_number_of_tokens_is_not_scored(remaining: float) -> None:
    assert predicted_length(asked(), prediction(remaining)) is None


def test_the_whole_limit_without_confidence_says_that_nothing_is_known() -> None:
    assert predicted_length(asked(), prediction(1000, 0.0)) is None
    assert predicted_length(asked(), prediction(1000, 0.1)) == 1000
    assert predicted_length(asked(), prediction(999, 0.0)) == 999
    assert predicted_length(asked(current_length=40), prediction(60)) == 100
    assert predicted_length(asked(current_length=40), prediction(960, 0.0)) is None


def test_intervals_are_scored_where_there_are_any() -> None:
    scores = LifetimeScores()
    for low, high in ((8, 10), (10, 20), (11, 20), (2, 9), (1, 10)):
        scores.end(ScoredPrediction(10.0, low, high), actual_length=10, max_length=50)
    scores.end(ScoredPrediction(10.0), actual_length=10, max_length=50)
    assert scores.metrics().coverage == 3 / 5
    known = LifetimePrediction(remaining_length=5, estimated_time=0, confidence=0.5, low=2, high=9)
    assert scored_prediction(asked(current_length=40), known) == (45, 42, 49)


def test_the_rank_correlation_is_spearmans() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 999]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 2, 2, 3], [1, 3, 2, 4]) == pytest.approx(0.9486832980505138)  # as scipy says
    assert rank_correlation([1, 1, 1], [1, 2, 3]) is None
    scores = LifetimeScores()
    for number in range(2000):
        guess = number if number >= 1000 else -number
        scores.end(ScoredPrediction(guess), actual_length=number, max_length=5000)
    assert scores.metrics().rank_correlation == pytest.approx(1)
