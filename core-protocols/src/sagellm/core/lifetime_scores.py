"""Scores any lifetime predictor: what it predicted at admission against what was generated."""

from __future__ import annotations

import math
from collections import Counter

from sagellm.core.protocols.lifetime import LifetimeMetrics, LifetimePrediction, PredictionRequest


class LifetimeScores:
    """The errors of predictions made at admission, in tokens. O(1) per sequence.

    A sequence that reached its `max_length` counts as cut and is not scored, as the limit says nothing about
    where it would have ended.
    """

    def __init__(self) -> None:
        self.num_predictions = 0
        self.num_updates = 0
        self._num_cut = 0
        self._lengths: Counter[int] = Counter()  # at most as many as there are lengths
        self._num_within = 0
        self._num_within_or_5 = 0
        self._sum_error = 0.0

    def end(self, predicted_length: float | None, *, actual_length: int, max_length: int) -> None:
        """Score the predicted length, if there is one, of a sequence that generated `actual_length`."""
        if actual_length >= max_length:
            self._num_cut += 1
            return
        if predicted_length is None:
            return
        error = abs(predicted_length - actual_length)
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
        )


def predicted_length(request: PredictionRequest, prediction: LifetimePrediction) -> float | None:
    """Return the whole output's predicted length, None if the prediction is not to be scored.

    Not scored are the whole limit with confidence 0, by which predictors say that they know nothing, and a
    length that is negative, infinite or not a number.
    """
    length = request.current_length + prediction.remaining_length
    knows_nothing = prediction.confidence == 0 and length >= request.max_length
    return None if knows_nothing or not 0 <= length < math.inf else length


def _mae_of_median(lengths: Counter[int]) -> float:
    """Return the mean absolute error of the best constant, which is a median. O(distinct lengths)."""
    half, num_seen, median = lengths.total() / 2, 0, 0
    for length in sorted(lengths):
        median, num_seen = length, num_seen + lengths[length]
        if num_seen >= half:
            break
    return sum(abs(length - median) * count for length, count in lengths.items()) / lengths.total()
