"""Mixes what is known of a request into one distribution of its output's length."""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from sagellm.core import (
    ConfigError,
    LifetimeMetrics,
    LifetimePrediction,
    LifetimePredictorProtocol,
    PredictionRequest,
    get_logger,
)
from sagellm.core.lifetime_scores import LifetimeScores, scored_prediction
from sagellm.core.protocols.lifetime import check_observation
from sagellm.kvmgr.lifetime.lengths import (
    NUM_BINS,
    Floats,
    bin_of,
    lengths_at,
    means_behind,
    position_of,
    positions_of,
    quantiles,
    share_below,
)
from sagellm.kvmgr.lifetime.sources import Asked, Everything, Source, statistical_sources

_logger = get_logger(__name__)

_LOGGED_EVERY = 1000  # updates
_WEIGHT_DECAY = 0.998
_PRIOR_STRENGTH = 4.0  # observations that a new kind of request takes its weights from
_NUM_PEERS, _MIN_PEERS = 128, 8
_MISSED = 0.1  # of the lengths on each side of an interval
_STEP = 0.02  # by which an interval's ends move


@dataclass(slots=True)
class _Live:
    """A sequence that has been asked about and has not ended."""

    asked: Asked
    names: tuple[str, ...]  # of the sources, with how much each knows
    densities: Floats  # (sources, bins)
    weights: Floats  # (sources,)
    cumulated: Floats  # (bins + 1,) of the mixture
    at_admission: LifetimePrediction | None = None
    correction: float = 1.0  # of the confidence at admission
    is_stale: bool = False  # asked about before what was learnt was forgotten


class MixturePredictor(LifetimePredictorProtocol):
    """Predicts the median of a mixture of what several sources say of an output's length.

    How much each source counts is learnt from the outputs that ended, by expectation maximization, separately
    for requests of which different things are known. A running sequence is asked about again with what it has
    generated: only longer outputs count then.

    The interval holds 80 % of the lengths: its ends are quantiles whose levels move with each length that
    is missed (adaptive conformal inference: Gibbs and Candès, 2021). The confidence is the chance that this
    request and another one are predicted in the right order: computed against the latest 128 that ended,
    then corrected by how often such orders proved right.

    Sequences that are neither updated nor forgotten go when `max_sequences` newer ones have been asked about.
    Equal calls give equal answers. Not thread-safe.
    """

    def __init__(self, everything: Everything, others: Sequence[Source], *, max_sequences: int) -> None:
        check_counts(max_sequences=max_sequences)
        self._max_sequences = max_sequences
        self._live: OrderedDict[str, _Live] = OrderedDict()  # least recently asked about first
        self._shares: dict[tuple[str, ...], Floats] = {}
        self._prior: defaultdict[str, float] = defaultdict(lambda: 1.0)  # shares of sources, of all requests
        self._seconds = self._tokens = 0.0
        self._scores = LifetimeScores()
        self._is_worse_than_median = self._has_forgotten = False
        self._start_over(everything, others)

    def predict(self, request: PredictionRequest) -> LifetimePrediction:
        """Predict what remains; the limit with confidence 0 if nothing is known."""
        return self.predict_all((request,))[0]

    def predict_all(self, requests: Sequence[PredictionRequest]) -> list[LifetimePrediction]:
        """Predict what remains of each."""
        if not requests:
            return []
        self._scores.num_predictions += len(requests)
        lives = [self._live_of(request) for request in requests]
        if not self._scores.num_updates:
            return [_unknown(request) for request in requests]
        found = self._answers(requests, np.stack([live.cumulated for live in lives]))
        for request, live, prediction in zip(requests, lives, found, strict=True):
            if not request.current_length:
                live.at_admission, live.correction = prediction, self._proven / self._claimed
        return found

    def update(self, *, sequence_id: str, actual_length: int, actual_time: float) -> None:
        """Learn from a sequence that ended; one never asked about counts only among all."""
        check_observation(actual_length=actual_length, actual_time=actual_time)
        self._scores.num_updates += 1
        self._seconds = 0.999 * self._seconds + actual_time
        self._tokens = 0.999 * self._tokens + actual_length
        live = self._live.pop(sequence_id, None)
        if live is None:
            self._everything.learn(_NOBODY, bin_of(actual_length))
            return
        request = live.asked.request
        is_cut = actual_length >= request.max_length
        place = live_tail(live.cumulated, actual_length) if is_cut else bin_of(actual_length)
        if live.is_stale:
            self._everything.learn(live.asked, place)
        else:
            self._weigh(live, place)
            for source in self._sources:
                source.learn(live.asked, place)
        predicted = live.at_admission
        scored = None if predicted is None else scored_prediction(request, predicted)
        self._scores.end(scored, actual_length=actual_length, max_length=request.max_length)
        if predicted is not None and not is_cut and not live.is_stale:
            self._calibrate(predicted, live.correction, actual_length)
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

    def _start_over(self, everything: Everything, others: Sequence[Source]) -> None:
        """Take new sources, which count as much as the old ones, and learn intervals and confidences anew.

        Running sequences are scored and counted among all outputs, and teach nothing else.
        """
        self._everything, self._sources = everything, (everything, *others)
        self._peers: npt.NDArray[np.float64] = np.zeros((2, _NUM_PEERS))  # lengths predicted, and true ones
        self._num_peers = 0
        self._claimed = self._proven = 1.0  # how much better than even orders were said to be, and were
        self._levels: Floats = np.array([_MISSED, 0.5, 1 - _MISSED])
        for live in self._live.values():
            live.is_stale = True

    def _live_of(self, request: PredictionRequest) -> _Live:
        live = self._live.get(request.sequence_id)
        if live is not None and request.current_length:
            self._live.move_to_end(request.sequence_id)
            return live
        asked = Asked(request, self._everything.overall)
        said = [found for source in self._sources if (found := source.density(asked)) is not None]
        names, densities = tuple(name for name, _ in said), np.stack([density for _, density in said])
        shares = self._shares.get(names)
        if shares is None:
            prior = np.array([self._prior[name] for name in names])
            shares = self._shares[names] = _PRIOR_STRENGTH * prior / prior.sum()
        weights = shares / shares.sum()
        cumulated = np.zeros(NUM_BINS + 1)
        np.cumsum(weights @ densities, out=cumulated[1:])
        live = _Live(asked, names, densities.astype(np.float32), weights, cumulated)
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
        return live

    def _answers(self, requests: Sequence[PredictionRequest], cumulated: Floats) -> list[LifetimePrediction]:
        """Return predictions from the distributions (requests, bins + 1) of their whole lengths."""
        current = np.array([request.current_length for request in requests], np.float64)
        limits = np.array([request.max_length for request in requests], np.float64)
        limits = np.maximum(limits - current, 0.0)
        starts = positions_of(current)
        gone = share_below(cumulated, starts[:, None])
        remaining = lengths_at(quantiles(cumulated, gone, self._levels)) - current[:, None]
        remaining = np.minimum(np.maximum(remaining, 1.0), limits[:, None])
        confidences = self._confidences(cumulated, gone, current, remaining[:, 1])
        means = np.clip(means_behind(cumulated, gone, starts, current + limits) - current, 1.0, limits)
        pace = self._seconds / self._tokens if self._tokens else 0.0
        return [
            LifetimePrediction(
                remaining_length=middle,
                estimated_time=middle * pace,
                confidence=confidence,
                low=low,
                high=high,
                mean=mean,
            )
            for (low, middle, high), confidence, mean in zip(
                remaining.tolist(), confidences.tolist(), means.tolist(), strict=True
            )
        ]

    def _confidences(self, cumulated: Floats, gone: Floats, current: Floats, remaining: Floats) -> Floats:
        """Return the chances (requests,) that each is ordered rightly against the latest that ended."""
        num = min(self._num_peers, _NUM_PEERS)
        if num < _MIN_PEERS:
            return np.full(len(remaining), 0.5)
        predicted, true = self._peers[:, :num]
        below = share_below(cumulated, positions_of(current[:, None] + true))
        is_shorter = np.clip((below - gone) / np.maximum(1 - gone, 1e-9), 0.0, 1.0)
        ahead = remaining[:, None] < predicted
        behind = remaining[:, None] > predicted
        right = np.where(ahead, is_shorter, np.where(behind, 1 - is_shorter, 0.5)).mean(1)
        found: Floats = np.clip(0.5 + (right - 0.5) * self._proven / self._claimed, 0.0, 1.0)
        return found

    def _weigh(self, live: _Live, place: int | Floats) -> None:
        """Learn which sources knew the length; of an output that was cut, that it would have been longer."""
        said = live.densities[:, place] if isinstance(place, int) else live.densities @ (place > 0)
        posterior = live.weights * said
        posterior /= posterior.sum()
        shares = self._shares[live.names]
        shares *= _WEIGHT_DECAY
        shares += posterior
        for name, share in zip(live.names, posterior.tolist(), strict=True):
            self._prior[name] += 0.01 * (len(live.names) * share - self._prior[name])

    def _calibrate(self, prediction: LifetimePrediction, correction: float, actual_length: int) -> None:
        """Learn from the length whether the interval held it, and whether orders proved right."""
        low, high = cast("float", prediction.low), cast("float", prediction.high)
        self._levels[0] += _STEP * (_MISSED - (actual_length < low))
        self._levels[2] += _STEP * ((actual_length > high) - _MISSED)
        self._levels[:] = np.clip(self._levels, (0.001, 0.5, 0.501), (0.499, 0.5, 0.999))
        num, length = min(self._num_peers, _NUM_PEERS), prediction.remaining_length
        if num >= _MIN_PEERS:
            predicted, true = self._peers[:, :num]
            signs = np.sign(length - predicted) * np.sign(actual_length - true)
            raw = (prediction.confidence - 0.5) / correction
            self._claimed = 0.998 * self._claimed + max(raw, 0.0)
            self._proven = max(0.998 * self._proven + float(signs.mean()) / 2, 0.01)
        self._peers[:, self._num_peers % _NUM_PEERS] = length, actual_length
        self._num_peers += 1

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
            ": nothing that is known of requests tells their output lengths" if is_worse else "",
        )
        self._is_worse_than_median = is_worse


class StatisticalLifetimePredictor(MixturePredictor):
    """Mixes the lengths of earlier outputs: to the same prefix, of the same prompt length, client, and all.

    What the prefix cache knows of answers to the same beginning counts most, where it knows any. Prompts
    are of one length within a quarter of an octave (256 … 319 tokens, say), and again within a 32nd; a client
    is a tenant with a limit.
    """

    def __init__(self, *, max_sequences: int = 16_384) -> None:
        super().__init__(Everything(0.9995), statistical_sources(), max_sequences=max_sequences)
        _logger.info("output lengths are predicted from those of earlier requests")


_NOBODY = Asked(PredictionRequest(sequence_id="", token_ids=()), np.zeros(NUM_BINS))


def live_tail(cumulated: Floats, length: int) -> Floats:
    """Return the density (bins,) of what exceeds a length."""
    density = np.diff(cumulated)
    place = position_of(length)
    first = int(place)
    density[:first] = 0.0
    density[first] *= 1 - (place - first)
    total = density.sum()
    found: Floats = density / total if total > 0 else density
    return found


def check_counts(**counts: int) -> None:
    """Raise ConfigError unless these options are positive ints."""
    for key, value in counts.items():
        if type(value) is not int or value < 1:
            raise ConfigError(f"predictor option {key} is {value!r}; it must be an int >= 1")


def _unknown(request: PredictionRequest) -> LifetimePrediction:
    limit = max(0, request.max_length - request.current_length)
    return LifetimePrediction(remaining_length=float(limit), estimated_time=0.0, confidence=0.0)
