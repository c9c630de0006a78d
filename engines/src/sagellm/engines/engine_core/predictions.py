"""What the lifetime predictor says about sequences, and how right it was."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import asdict, replace

import numpy as np

from sagellm.core import (
    InvalidInputError,
    LifetimeMetrics,
    LifetimePrediction,
    LifetimePredictorProtocol,
    PluginRegistry,
    PredictionRequest,
)
from sagellm.core.lifetime_scores import LifetimeScores, scored_prediction
from sagellm.core.plugins.failure import contained
from sagellm.core.protocols.prefix_cache import PrefixCacheProtocol
from sagellm.core.unchecked import unchecked
from sagellm.engines.engine_core.observers import Failures
from sagellm.engines.engine_core.seats import Seats
from sagellm.engines.engine_core.sequence import Sequence

_MOST_TOKENS = 1 << 31
_MIN_TOKENS = 8
"""Tokens that a sequence generates at least before its length is predicted once more."""


class Predictions:
    """Asks and teaches the predictor, and scores it. What it raises is only logged: it only guesses.

    A sequence is predicted when it arrives, and again when it has become longer than predicted.
    """

    def __init__(
        self,
        predictor: LifetimePredictorProtocol,
        registry: PluginRegistry,
        cache: PrefixCacheProtocol,
        seats: Seats,
    ) -> None:
        self._predictor, self._cache, self._seats = predictor, cache, seats
        self._failures = Failures(registry, "the lifetime predictor")
        self._scores = LifetimeScores()

    def begin(self, sequence: Sequence) -> None:
        """Ask about a sequence that has just arrived."""
        request = sequence.request
        with contained() as failure:
            self._scores.num_predictions += 1
            sequence.asked = asked = PredictionRequest(
                sequence_id=sequence.sequence_id,
                token_ids=request.token_ids,
                max_length=request.max_tokens,
                tenant=request.tenant.name,
                answers=self._cache.answers(request.token_ids, request.namespace),
                arrival_ns=request.arrival_ns,
            )
            prediction = self._predictor.predict(asked)
            _take(sequence, prediction, 0)
            sequence.scored = scored_prediction(asked, prediction)
        self._failures.log(failure.error)

    def replace(self, predictor: LifetimePredictorProtocol, sequences: Seq[Sequence]) -> None:
        """Ask another predictor from now on, first of all about the sequences that are live; scores restart.

        If it raises, or predicts what cannot be, the old one stays.
        """
        lengths = [sequence.num_output_tokens for sequence in sequences]
        asked = [
            unchecked(PredictionRequest, vars(sequence.asked), current_length=length)
            for sequence, length in zip(sequences, lengths, strict=True)
        ]
        found = list(predictor.predict_all(asked))
        if len(found) != len(asked):
            raise ValueError(f"it answers {len(asked)} requests with {len(found)} predictions")
        expected = list(map(_mean_of, sequences, found))
        self._predictor, self._scores = predictor, LifetimeScores()
        self._scores.num_predictions = len(found)
        for sequence, request, prediction, length, mean in zip(
            sequences, asked, found, lengths, expected, strict=True
        ):
            sequence.predicted_tokens, sequence.confidence = length + mean, float(prediction.confidence)
            sequence.scored = scored_prediction(request, prediction)
            if sequence.seat is not None:
                self._put(sequence, length)

    def renew(self, num_steps: int = 1) -> None:
        """Ask again about the running sequences that have become longer than predicted, all at once.

        Of several steps that were planned as one, each asks about those that are then.
        """
        seats = self._seats
        while (first := int((seats.ask_at - seats.num_tokens).min())) < num_steps:
            num_more = max(first, 0)
            due = np.flatnonzero(seats.num_tokens + num_more >= seats.ask_at)
            lengths = (seats.num_tokens[due] + num_more - seats.num_prompt[due]).tolist()
            with contained() as failure:
                self._renew(seats.sequences[due].tolist(), lengths)
            if failure.error is not None:
                seats.ask_at[due] = np.iinfo(np.int32).max  # it keeps what was predicted first
            self._failures.log(failure.error)

    def end(self, sequence: Sequence, finished_ns: int, *, has_stopped: bool) -> None:
        """Score what was predicted of a sequence that stopped or reached its limit, and teach it."""
        actual_length, max_length = sequence.num_output_tokens, sequence.request.max_tokens
        self._scores.end(sequence.scored, actual_length=actual_length, max_length=max_length)
        self._scores.num_updates += 1
        with contained() as failure:
            if has_stopped:
                request = sequence.request
                self._cache.record_answer(request.token_ids, actual_length, request.namespace)
            self._predictor.update(
                sequence_id=sequence.sequence_id,
                actual_length=actual_length,
                actual_time=(finished_ns - sequence.request.arrival_ns) / 1e9,
            )
        self._failures.log(failure.error)

    def forget(self, sequence: Sequence) -> None:
        """Tell the predictor that a sequence ended before its length was known."""
        with contained() as failure:
            self._predictor.forget(sequence_id=sequence.sequence_id)
        self._failures.log(failure.error)

    def metrics(self) -> LifetimeMetrics:
        """Return the engine's own scores, with the fields that a predictor's metrics add to them."""
        scores = self._scores.metrics()
        with contained() as failure:
            own = self._predictor.metrics()
            if isinstance(own, LifetimeMetrics):
                return replace(own, **asdict(scores))
        self._failures.log(failure.error)
        return scores

    def _renew(self, sequences: Seq[Sequence], lengths: Seq[int]) -> None:
        asked = [
            unchecked(PredictionRequest, vars(sequence.asked), current_length=length)
            for sequence, length in zip(sequences, lengths, strict=True)
        ]
        found = self._predictor.predict_all(asked)
        for sequence, length, prediction in zip(sequences, lengths, found, strict=True):
            _take(sequence, prediction, length)
            self._put(sequence, length)

    def _put(self, sequence: Sequence, length: int) -> None:
        """Put what is predicted of a running sequence into its columns, and say when to ask again."""
        seats, seat = self._seats, sequence.seat
        assert seat is not None, "it runs"
        columns = seats.schedule_columns.arrays
        columns["predicted_tokens"][seat] = sequence.predicted_tokens
        columns["confidence"][seat] = sequence.confidence
        ahead = max(int(sequence.predicted_tokens or 0) + 1 - length, _MIN_TOKENS, length // 4)
        seats.ask_at[seat] = seats.num_prompt[seat] + length + ahead


def _take(sequence: Sequence, prediction: LifetimePrediction, length: int) -> None:
    """Note what is predicted of a sequence with so much output: the mean, by which orders are best."""
    mean = _mean_of(sequence, prediction)
    sequence.predicted_tokens, sequence.confidence = length + mean, float(prediction.confidence)


def _mean_of(sequence: Sequence, prediction: LifetimePrediction) -> float:
    """Return how many more tokens are expected. Raises InvalidInputError for what cannot be."""
    median, confidence = float(prediction.remaining_length), float(prediction.confidence)
    remaining = median if prediction.mean is None else float(prediction.mean)
    if not (0 <= median < _MOST_TOKENS and 0 <= remaining < _MOST_TOKENS and 0 <= confidence <= 1):
        raise InvalidInputError(
            f"what it predicts of {sequence.sequence_id} is not possible: {remaining} tokens "
            f"(median {median}) with confidence {confidence}"
        )
    return remaining
