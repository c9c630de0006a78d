"""What the lifetime predictor says about sequences, and how right it was."""

from __future__ import annotations

from dataclasses import asdict, replace

from sagellm.core import LifetimeMetrics, LifetimePredictorProtocol, PluginRegistry, PredictionRequest
from sagellm.core.lifetime_scores import LifetimeScores, predicted_length
from sagellm.core.plugins.failure import contained
from sagellm.engines.engine_core.observers import Failures
from sagellm.engines.engine_core.sequence import Sequence


class Predictions:
    """Asks and teaches the predictor, and scores it. What it raises is only logged: it only guesses."""

    def __init__(self, predictor: LifetimePredictorProtocol, registry: PluginRegistry) -> None:
        self._predictor = predictor
        self._failures = Failures(registry, "the lifetime predictor")
        self._scores = LifetimeScores()

    def begin(self, sequence: Sequence) -> None:
        """Ask about a sequence that has just arrived."""
        request = sequence.request
        asked = PredictionRequest(
            sequence_id=sequence.sequence_id, token_ids=request.token_ids, max_length=request.max_tokens
        )
        with contained() as failure:
            self._scores.num_predictions += 1
            prediction = self._predictor.predict(asked)
            sequence.scored_length = predicted_length(asked, prediction)
            remaining, confidence = float(prediction.remaining_length), float(prediction.confidence)
            sequence.predicted_tokens, sequence.confidence = remaining, confidence
        self._failures.log(failure.error)

    def end(self, sequence: Sequence, finished_ns: int) -> None:
        """Score what was predicted of a sequence that stopped or reached its limit, and teach it."""
        actual_length, max_length = sequence.num_output_tokens, sequence.request.max_tokens
        self._scores.end(sequence.scored_length, actual_length=actual_length, max_length=max_length)
        self._scores.num_updates += 1
        with contained() as failure:
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
