"""Corrects any predictor by how wrong it has been lately, and forgets when that changes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from sagellm.core import (
    LifetimePrediction,
    LifetimePredictorProtocol,
    PluginRegistry,
    PredictionRequest,
    ProviderSpec,
    get_logger,
)
from sagellm.core.lifetime_scores import scored_prediction
from sagellm.kvmgr.lifetime.lengths import NUM_BINS, Floats, position_of
from sagellm.kvmgr.lifetime.mixture import MixturePredictor
from sagellm.kvmgr.lifetime.sources import Asked, Everything, Guess, Source

_logger = get_logger(__name__)

_DECAY = 0.99
_SLACK, _LIMIT, _MOST = 0.25, 30.0, 3.0  # standard deviations of errors
_MIN_DEVIATION = 1.0  # bin
_MIN_SEEN = 50
_DOUBT = 0.02  # share of the density of all outputs, so that nothing is impossible


class Drift:
    """Notices that errors, in bins, have grown: the Page–Hinkley test (Page, 1954).

    Errors that are a standard deviation larger than several hundred before are noticed after some 40, a step
    of three or more after some 15. No error counts for more than three: a few outliers are no growth.
    """

    def __init__(self) -> None:
        self._count, self._mean, self._squares, self._sum = 0, 0.0, 0.0, 0.0

    def is_after(self, error: float) -> bool:
        """Add an error; say whether errors have been larger than before for long enough."""
        if self._count >= _MIN_SEEN:
            deviation = max(math.sqrt(self._squares / self._count), _MIN_DEVIATION)
            error = min(error, self._mean + _MOST * deviation)
            self._sum = max(0.0, self._sum + (error - self._mean) / deviation - _SLACK)
        if self._sum > _LIMIT:
            return True
        self._count += 1
        before = error - self._mean
        self._mean += before / self._count
        self._squares += before * (error - self._mean)
        return False


class OnlineLifetimePredictor(MixturePredictor):
    """Learns how what another predictor says relates to true lengths, and follows when that changes.

    `base` names the predictor, with its options. Its lengths count as ratios to the true ones, of which the
    latest hundred or so matter; beside them, what outputs have been like lately. If errors grow, by
    the Page–Hinkley test, the predictor is made anew, and ratios, intervals and confidences are learnt from
    requests that arrive afterwards. What is kept: how much each source counts, the seconds per token, and
    the scores.
    """

    def __init__(
        self,
        *,
        base: str = "statistical",
        base_options: Mapping[str, Any] | None = None,
        max_sequences: int = 16_384,
    ) -> None:
        self._spec = ProviderSpec(name=base, options=dict(base_options or {}))
        self._registry = PluginRegistry.load()
        self._base = self._new_base()
        self._drift = Drift()
        self.num_drifts = 0
        super().__init__(*self._new_sources(), max_sequences=max_sequences)
        _logger.info("the lifetime predictor %s is corrected by what it gets wrong", base)

    def update(self, *, sequence_id: str, actual_length: int, actual_time: float) -> None:
        """Learn from a sequence that ended, and teach the predictor."""
        live = self._live.get(sequence_id)
        super().update(sequence_id=sequence_id, actual_length=actual_length, actual_time=actual_time)
        self._base.update(sequence_id=sequence_id, actual_length=actual_length, actual_time=actual_time)
        if live is None or live.is_stale or live.at_admission is None:
            return
        if actual_length >= live.asked.request.max_length:
            return
        error = position_of(live.at_admission.remaining_length) - position_of(actual_length)
        if self._drift.is_after(abs(error)):
            self.num_drifts += 1
            self._drift = Drift()
            _logger.info("output lengths have changed: what was learnt of them is forgotten")
            self._base = self._new_base()
            self._start_over(*self._new_sources())

    def forget(self, *, sequence_id: str) -> None:
        """Drop what was asked about it."""
        super().forget(sequence_id=sequence_id)
        self._base.forget(sequence_id=sequence_id)

    def _new_base(self) -> LifetimePredictorProtocol:
        made: LifetimePredictorProtocol = self._registry.make("lifetime_predictor", self._spec)
        return made

    def _new_sources(self) -> tuple[Everything, list[Source]]:
        said = _Said(self._base)
        return Everything(_DECAY), [said, Guess("corrected", said.guess, _DECAY)]


class _Said(Source):
    """What a predictor says, as it says it: its length and interval."""

    name = "said"

    def __init__(self, base: LifetimePredictorProtocol) -> None:
        self._base = base
        self._latest = LifetimePrediction(remaining_length=0.0, estimated_time=0.0, confidence=0.0)

    def density(self, asked: Asked) -> tuple[str, Floats] | None:
        """Return a logistic density over bins on either side of the length; None without an interval."""
        found = self._latest = self._base.predict(asked.request)
        if found.low is None or found.high is None or scored_prediction(asked.request, found) is None:
            return None
        low, middle, high = map(position_of, (found.low, found.remaining_length, found.high))
        distance = np.arange(NUM_BINS + 1) - middle
        scale = np.where(distance < 0, max(middle - low, 0.5), max(high - middle, 0.5)) / math.log(9)
        cumulated = 1 / (1 + np.exp(np.clip(-distance / scale, -50.0, 50.0)))
        return self.name, np.diff(cumulated) + _DOUBT * asked.overall

    def learn(self, asked: Asked, place: int | Floats) -> None:
        """Leave it to the predictor, which is told as well."""

    def guess(self, request: PredictionRequest) -> tuple[float, int] | None:
        """Return the length said last, and how sure the predictor was, in tenths."""
        found = scored_prediction(request, self._latest)
        return None if found is None else (found.length, int(10 * self._latest.confidence))
