"""How much longer a sequence will generate."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from sagellm.core.ids import SequenceId
from sagellm.core.tokens import TokenIdsLike


@dataclass(frozen=True, kw_only=True)
class PredictionRequest:
    """The sequence asked about. `current_length` and `max_length` count generated tokens."""

    sequence_id: SequenceId
    token_ids: TokenIdsLike  # the prompt
    current_length: int = 0
    max_length: int = 1 << 30


@dataclass(frozen=True, kw_only=True)
class LifetimePrediction:
    """What is still to come. Use it only when the confidence is above a threshold (0.8 by default)."""

    remaining_length: float  # tokens
    estimated_time: float  # seconds
    confidence: float  # 0 … 1


@dataclass(frozen=True, kw_only=True)
class LifetimeMetrics:
    """Errors of the predictions made at admission, for sequences that have ended."""

    num_predictions: int
    num_updates: int
    mae_tokens: float  # mean absolute error; 0 before the first update
    within_10_percent: float  # share of predictions with an error of at most 10 % of the true length


class LifetimePredictorProtocol(ABC):
    """Predicts the remaining output of a sequence and learns from those that ended.

    Providers are called as `factory(**options)`. The engine calls `predict` at admission and
    perhaps later, and `update` once when a sequence ended by itself or at its limit, never for an
    aborted one. Both take less than a millisecond and never block.
    """

    @abstractmethod
    def predict(self, request: PredictionRequest) -> LifetimePrediction:
        """Predict what remains; never more than `max_length - current_length` and never negative."""

    @abstractmethod
    def update(self, *, sequence_id: SequenceId, actual_length: int, actual_time: float) -> None:
        """Learn that a sequence generated `actual_length` tokens in `actual_time` seconds."""

    @abstractmethod
    def metrics(self) -> LifetimeMetrics:
        """Return the errors so far."""


class NullLifetimePredictor(LifetimePredictorProtocol):
    """Knows nothing: predicts the limit, without confidence."""

    def predict(self, request: PredictionRequest) -> LifetimePrediction:
        """Predict that the sequence runs to its limit."""
        remaining = max(0, request.max_length - request.current_length)
        return LifetimePrediction(remaining_length=remaining, estimated_time=0.0, confidence=0.0)

    def update(self, *, sequence_id: SequenceId, actual_length: int, actual_time: float) -> None:
        """Learn nothing."""

    def metrics(self) -> LifetimeMetrics:
        """Return zeros."""
        return LifetimeMetrics(num_predictions=0, num_updates=0, mae_tokens=0.0, within_10_percent=0.0)
