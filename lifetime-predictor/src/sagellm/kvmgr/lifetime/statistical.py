"""Predicts the median output length of earlier prompts of similar length."""

from __future__ import annotations

import logging
import math
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from typing import NamedTuple

from sagellm.core import (
    ConfigError,
    LifetimeMetrics,
    LifetimePrediction,
    LifetimePredictorProtocol,
    PredictionRequest,
    get_logger,
)
from sagellm.core.lifetime_scores import LifetimeScores, predicted_length
from sagellm.core.protocols.lifetime import check_observation


class Window:
    """The last `size` numbers, sorted. Adding costs O(size) in moved bytes, about 1 µs for 1,000."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._by_age: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, value: float) -> None:
        """Add a number, and drop the oldest one if there are too many."""
        if len(self._by_age) == self._size:
            del self._sorted[bisect_left(self._sorted, self._by_age.popleft())]
        self._by_age.append(value)
        insort(self._sorted, value)

    def count_above(self, bound: float) -> int:
        """Count the numbers greater than `bound`."""
        return len(self._sorted) - bisect_right(self._sorted, bound)

    def median_above(self, bound: float) -> float:
        """Return the median of the numbers greater than `bound`, at least one of which must exist."""
        first = bisect_right(self._sorted, bound)
        middle = first + len(self._sorted)
        return (self._sorted[(middle - 1) // 2] + self._sorted[middle // 2]) / 2

    def count_between(self, low: float, high: float) -> int:
        """Count the numbers in low … high, both ends included."""
        return bisect_right(self._sorted, high) - bisect_left(self._sorted, low)


_logger = get_logger(__name__)

_LOGGED_EVERY = 1000  # updates

_CAUTION = 2  # confidence = hits ÷ (observations + 2), so few observations give low confidence
_REL_TOLERANCE, _MIN_TOLERANCE_TOKENS = 0.1, 5.0


class _Live(NamedTuple):
    """A sequence that has been asked about and has not ended."""

    bucket: int
    predicted_length: float | None  # at admission
    max_length: int


class StatisticalLifetimePredictor(LifetimePredictorProtocol):
    """Predicts the median output length of earlier prompts of similar length.

    Similar length is a quarter of an octave (256 … 319 tokens, say). A bucket is used once
    `min_observations` of its lengths exceed what the sequence has already generated, otherwise
    all prompts together are; the prediction is the median of those lengths, minus the tokens already
    generated. If no recorded length is greater, it is the limit, with confidence 0.

    `confidence` is the share of those lengths that the prediction misses by at most 10 % of the
    remaining length, or 5 tokens, computed as hits ÷ (observations + 2).
    `estimated_time` = remaining length × median seconds per token of the latest `window` sequences.

    Each bucket keeps its latest `window` lengths. Sequences that are neither updated nor forgotten go
    when `max_sequences` newer ones have been asked about. `predict` and `update` cost
    O(log window), about 5 µs; equal calls give equal answers. Not thread-safe.
    """

    def __init__(self, *, window: int = 1000, min_observations: int = 8, max_sequences: int = 16_384) -> None:
        options = {"window": window, "min_observations": min_observations, "max_sequences": max_sequences}
        for key, value in options.items():
            if type(value) is not int or value < 1:
                raise ConfigError(f"predictor option {key} is {value!r}; it must be an int >= 1")
        self._window = window
        self._min_observations = min_observations
        self._max_sequences = max_sequences
        self._all_lengths = Window(window)
        self._lengths: dict[int, Window] = {}  # by bucket
        self._seconds_per_token = Window(window)
        self._live: OrderedDict[str, _Live] = OrderedDict()  # least recently asked about first
        self._scores = LifetimeScores()
        self._is_worse_than_median = False
        self._has_forgotten = False
        _logger.info(
            "output lengths are predicted from the last %d of similar prompts, once %d are known",
            window,
            min_observations,
        )

    def predict(self, request: PredictionRequest) -> LifetimePrediction:
        """Predict what remains; the limit with confidence 0 if nothing is known."""
        current = request.current_length
        limit = max(0, request.max_length - current)
        bucket = bucket_of(len(request.token_ids))
        lengths = self._lengths_beyond(bucket, current)
        if lengths is None:
            remaining, confidence = float(limit), 0.0
        else:
            remaining = float(min(lengths.median_above(current) - current, limit))
            confidence = _confidence(lengths, current, remaining, limit)
        pace = self._seconds_per_token.median_above(-1.0) if len(self._seconds_per_token) else 0.0
        prediction = LifetimePrediction(
            remaining_length=remaining, estimated_time=remaining * pace, confidence=confidence
        )
        self._remember(request, _Live(bucket, predicted_length(request, prediction), request.max_length))
        self._scores.num_predictions += 1
        return prediction

    def update(self, *, sequence_id: str, actual_length: int, actual_time: float) -> None:
        """Learn from a sequence that ended; one never asked about counts only overall, in no bucket."""
        check_observation(actual_length=actual_length, actual_time=actual_time)
        self._scores.num_updates += 1
        self._all_lengths.add(actual_length)
        if actual_length:
            self._seconds_per_token.add(actual_time / actual_length)
        live = self._live.pop(sequence_id, None)
        if live is None:
            return
        if live.bucket not in self._lengths:
            self._lengths[live.bucket] = Window(self._window)
        self._lengths[live.bucket].add(actual_length)
        self._scores.end(live.predicted_length, actual_length=actual_length, max_length=live.max_length)
        if self._scores.num_updates % _LOGGED_EVERY == 0:
            self._report()

    def forget(self, *, sequence_id: str) -> None:
        """Drop what was asked about it."""
        self._live.pop(sequence_id, None)

    def metrics(self) -> LifetimeMetrics:
        """Return the errors of the predictions that were made at admission."""
        return self._scores.metrics()

    @property
    def num_live_sequences(self) -> int:
        """Sequences that have been asked about and not ended, at most `max_sequences`."""
        return len(self._live)

    def _lengths_beyond(self, bucket: int, current: int) -> Window | None:
        """Choose the lengths to use: the bucket's, all, or none if nothing was that long."""
        own = self._lengths.get(bucket)
        if own is not None and own.count_above(current) >= self._min_observations:
            return own
        return self._all_lengths if self._all_lengths.count_above(current) else None

    def _report(self) -> None:
        """Log the error, and when predictions become or cease to be worse than always the same one."""
        found = self.metrics()
        if found.mae_tokens is None or found.median_mae_tokens is None:
            _logger.info("%d sequences have ended, and none had a prediction to score", found.num_updates)
            return
        is_worse = found.mae_tokens > found.median_mae_tokens
        _logger.log(
            logging.DEBUG if is_worse == self._is_worse_than_median else logging.INFO,
            "%d sequences have ended; the mean error of predictions is %.1f tokens, %s the %.1f of always "
            "predicting the median%s",
            found.num_updates,
            found.mae_tokens,
            "above" if is_worse else "not above",
            found.median_mae_tokens,
            ": output lengths do not follow prompt lengths here" if is_worse else "",
        )
        self._is_worse_than_median = is_worse

    def _remember(self, request: PredictionRequest, live: _Live) -> None:
        # A later question about a running sequence leaves the prediction made at admission in place.
        if request.current_length == 0 or request.sequence_id not in self._live:
            self._live[request.sequence_id] = live
        self._live.move_to_end(request.sequence_id)
        if len(self._live) > self._max_sequences:
            self._live.popitem(last=False)
            if not self._has_forgotten:
                self._has_forgotten = True
                _logger.info(
                    "more than %d sequences have not ended: those asked about longest ago count as aborted",
                    self._max_sequences,
                )


def bucket_of(num_tokens: int) -> int:
    """Number the quarters of octaves: 0 … 7 tokens have a bucket each, then 8–9, 10–11, … 16–19, …"""
    shift = max(0, num_tokens.bit_length() - 3)
    return 4 * shift + (num_tokens >> shift)


def _confidence(lengths: Window, current: int, remaining: float, limit: int) -> float:
    """Return the share of `lengths` beyond `current` for which `remaining` is a good prediction.

    Good means an error of at most max(10 % of the true remaining length, 5 tokens), which, solved
    for the true length, gives an interval.
    """
    low = min(remaining / (1 + _REL_TOLERANCE), remaining - _MIN_TOLERANCE_TOKENS)
    high = max(remaining / (1 - _REL_TOLERANCE), remaining + _MIN_TOLERANCE_TOKENS)
    if high >= limit:  # longer outputs are cut there
        high = math.inf
    hits = lengths.count_between(max(current + low, current + 1), current + high)
    return hits / (lengths.count_above(current) + _CAUTION)
