"""Scores any lifetime predictor: what it predicted at admission against what was generated."""

from __future__ import annotations

import math
import operator
from collections import Counter, deque
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from sagellm.core.protocols.lifetime import LifetimeMetrics, LifetimePrediction, PredictionRequest

_NUM_RANKED = 1000


class ScoredPrediction(NamedTuple):
    """The whole output's predicted length, and its interval if there is one; tokens."""

    length: float
    low: float | None = None
    high: float | None = None


class LifetimeScores:
    """The errors of predictions made at admission, in tokens. O(1) per sequence.

    A sequence that reached its `max_length` counts as cut and is not scored, as the limit says nothing about
    where it would have ended. The rank correlation is that of the latest 1,000.
    """

    def __init__(self) -> None:
        self.num_predictions = 0
        self.num_updates = 0
        self._num_cut = 0
        self._lengths: Counter[int] = Counter()  # at most as many as there are lengths
        self._num_within = 0
        self._num_within_or_5 = 0
        self._num_intervals = self._num_covered = 0
        self._sum_error = 0.0
        self._latest: deque[tuple[float, int]] = deque(maxlen=_NUM_RANKED)

    def end(self, predicted: ScoredPrediction | None, *, actual_length: int, max_length: int) -> None:
        """Score the prediction, if there is one, of a sequence that generated `actual_length`."""
        if actual_length >= max_length:
            self._num_cut += 1
            return
        if predicted is None:
            return
        self._latest.append((predicted.length, actual_length))
        if predicted.low is not None and predicted.high is not None:
            self._num_intervals += 1
            self._num_covered += predicted.low <= actual_length <= predicted.high
        error = abs(predicted.length - actual_length)
        is_within = 10 * error <= actual_length  # exact for whole tokens, unlike error ≤ 0.1 · length
        self._lengths[actual_length] += 1
        self._sum_error += error
        self._num_within += is_within
        self._num_within_or_5 += is_within or error <= 5

    def metrics(self) -> LifetimeMetrics:
        """Return the errors so far."""
        num_scored = self._lengths.total()
        counts = {"num_predictions": self.num_predictions, "num_updates": self.num_updates}
        if not num_scored:
            return LifetimeMetrics(**counts, num_cut=self._num_cut)
        return LifetimeMetrics(
            **counts,
            num_cut=self._num_cut,
            num_scored=num_scored,
            mae_tokens=self._sum_error / num_scored,
            median_mae_tokens=_mae_of_median(self._lengths),
            within_10_percent=self._num_within / num_scored,
            within_10_percent_or_5_tokens=self._num_within_or_5 / num_scored,
            rank_correlation=rank_correlation(*map(list, zip(*self._latest, strict=True))),
            coverage=self._num_covered / self._num_intervals if self._num_intervals else None,
        )


def predicted_length(request: PredictionRequest, prediction: LifetimePrediction) -> float | None:
    """Return the whole output's predicted length, None if the prediction is not to be scored.

    Not scored are the whole limit with confidence 0, by which predictors say that they know nothing, and a
    length that is negative, infinite or not a number.
    """
    length = request.current_length + prediction.remaining_length
    knows_nothing = prediction.confidence == 0 and length >= request.max_length
    return None if knows_nothing or not 0 <= length < math.inf else length


def scored_prediction(request: PredictionRequest, prediction: LifetimePrediction) -> ScoredPrediction | None:
    """Return what is to be scored of a prediction; None if `predicted_length` is."""
    if (length := predicted_length(request, prediction)) is None:
        return None
    if prediction.low is None or prediction.high is None:
        return ScoredPrediction(length)
    current = request.current_length
    return ScoredPrediction(length, current + prediction.low, current + prediction.high)


def rank_correlation(predicted: Sequence[float], actual: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation; ties share their mean rank. None where all are alike."""
    first, second = _ranks(predicted), _ranks(actual)
    scale = math.sqrt(_product(first, first) * _product(second, second))
    return _product(first, second) / scale if scale else None


def _product(first: list[float], second: list[float]) -> float:
    return math.fsum(map(operator.mul, first, second))


def _ranks(values: Sequence[float]) -> list[float]:
    """Return the ranks less their mean."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    for _, tied in groupby(enumerate(order), key=lambda each: values[each[1]]):
        places = list(tied)
        for _, index in places:
            ranks[index] = (places[0][0] + places[-1][0] - len(values) + 1) / 2
    return ranks


def _mae_of_median(lengths: Counter[int]) -> float:
    """Return the mean absolute error of the best constant, which is a median. O(distinct lengths)."""
    half, num_seen, median = lengths.total() / 2, 0, 0
    for length in sorted(lengths):
        median, num_seen = length, num_seen + lengths[length]
        if num_seen >= half:
            break
    return sum(abs(length - median) * count for length, count in lengths.items()) / lengths.total()
