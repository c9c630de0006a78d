"""How much longer a sequence will generate."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from sagellm.core.errors import ConfigError, InvalidInputError
from sagellm.core.protocols.prefix_cache import PrefixAnswers
from sagellm.core.tokens import TokenIdsLike


@dataclass(frozen=True, kw_only=True)
class PredictionRequest:
    """The sequence asked about. `current_length` and `max_length` count generated tokens.

    `answers` is what the prefix cache knew when the request arrived, the longest prefix first. A sequence
    that is asked about again comes with the same fields, but for `current_length`.
    Raises InvalidInputError for a length that is not an int or is negative.
    """

    sequence_id: str
    token_ids: TokenIdsLike  # the prompt
    current_length: int = 0
    max_length: int = 1 << 30
    tenant: str = ""
    answers: Sequence[PrefixAnswers] = ()
    arrival_ns: int = 0  # on the prefix cache's clock

    def __post_init__(self) -> None:
        for name, value in (("current_length", self.current_length), ("max_length", self.max_length)):
            if type(value) is not int or value < 0:
                raise InvalidInputError(
                    f"{name} of sequence {self.sequence_id!r} is {value!r}; give an int >= 0"
                )


@dataclass(frozen=True, kw_only=True)
class LifetimePrediction:
    """What is still to come. Callers decide how much confidence they require.

    The confidence is the probability that predictions put this sequence and another running one in the right
    order; 0.5 is no better than chance. The whole limit with confidence 0 means that nothing is known, and is
    not scored. Eight of ten lengths should lie in the interval, its ends included.
    """

    remaining_length: float  # tokens
    estimated_time: float  # seconds
    confidence: float  # 0 … 1
    low: float | None = None  # tokens: an interval for the remaining length
    high: float | None = None
    mean: float | None = None  # tokens: the expected remaining length, if `remaining_length` is another one


@dataclass(frozen=True, kw_only=True)
class LifetimeMetrics:
    """Errors of the predictions made at admission, for sequences that ended by themselves.

    Not scored: predictions based on no observation, and sequences that reached the `max_length` of
    their prediction, as the limit says nothing about where they would have ended. Errors are None before the
    first scored prediction.
    """

    num_predictions: int
    num_updates: int
    num_cut: int = 0  # sequences that ended at `max_length`
    num_scored: int = 0  # predictions that the errors below cover
    mae_tokens: float | None = None  # mean absolute error
    median_mae_tokens: float | None = None  # of the best constant in hindsight, the median length
    within_10_percent: float | None = None  # share with an error of at most 10 % of the true length
    within_10_percent_or_5_tokens: float | None = None  # the larger of the two
    rank_correlation: float | None = None  # Spearman's, of the latest 1,000; None where all are alike
    coverage: float | None = None  # share of lengths inside the predicted interval; it should be 0.8


class TrainingEpoch(NamedTuple):
    """One pass over the examples that a predictor is trained on. Losses have its own unit."""

    epoch: int  # from 1
    loss: float
    held_back_loss: float  # of the examples that it was not trained on
    held_back_mae: float  # tokens


def check_observation(*, actual_length: int, actual_time: float) -> None:
    """Raise InvalidInputError unless these are possible for a sequence: finite and not negative."""
    if type(actual_length) is not int or actual_length < 0:
        raise InvalidInputError(
            f"actual_length is {actual_length!r}; give the generated tokens as an int >= 0"
        )
    is_number = isinstance(actual_time, (int, float)) and not isinstance(actual_time, bool)
    if not is_number or not math.isfinite(actual_time) or actual_time < 0:
        raise InvalidInputError(f"actual_time is {actual_time!r}; give seconds as a finite number >= 0")


class LifetimePredictorProtocol(ABC):
    """Predicts the remaining output of a sequence and learns from those that ended.

    Providers are called as `factory()`. The engine calls `predict` at admission and
    perhaps later, then `update` once when a sequence ended by itself or at its limit, or `forget` when it
    ended otherwise. Each takes less than a millisecond and never blocks.

    The engine itself scores what was predicted at admission, for every predictor alike (LifetimeScores).
    """

    @abstractmethod
    def predict(self, request: PredictionRequest) -> LifetimePrediction:
        """Predict what remains; never more than `max_length - current_length` and never negative."""

    @classmethod
    def train(
        cls,
        examples: Sequence[tuple[PredictionRequest, int]],
        path: Path,
        *,
        num_epochs: int = 30,
        seed: int = 0,
        tell: Callable[[TrainingEpoch], None] = lambda epoch: None,
    ) -> None:
        """Learn from requests and the lengths of their outputs, in order of time, and write it to a file.

        The provider reads it with its option `weights`. Calls `tell` after each epoch. Raises ConfigError for
        too few examples, and by default: most predictors learn while they serve.
        """
        del examples, path, num_epochs, seed, tell
        raise ConfigError(f"{cls.__name__} is not trained beforehand: it learns while it serves")

    def predict_all(self, requests: Sequence[PredictionRequest]) -> list[LifetimePrediction]:
        """Predict what remains of each: as `predict` would one after another, which is the default."""
        return [self.predict(request) for request in requests]

    @abstractmethod
    def update(self, *, sequence_id: str, actual_length: int, actual_time: float) -> None:
        """Learn that a sequence generated `actual_length` tokens in `actual_time` seconds.

        Sequences never asked about are learnt from too. Raises InvalidInputError, and learns
        nothing, if `check_observation` does.
        """

    def forget(self, *, sequence_id: str) -> None:  # noqa: B027  (most predictors keep nothing by sequence)
        """Drop what is kept for a sequence that was aborted or failed. Idempotent; by default nothing is."""

    @abstractmethod
    def metrics(self) -> LifetimeMetrics:
        """Return what the predictor counts. The engine replaces the fields of LifetimeMetrics by its own.

        A subclass may add fields; `sage llm predictor stats` shows them too.
        """


class NullLifetimePredictor(LifetimePredictorProtocol):
    """Knows nothing: predicts the limit, without confidence."""

    def __init__(self, **_: object) -> None:
        self._num_predictions = 0
        self._num_updates = 0

    def predict(self, request: PredictionRequest) -> LifetimePrediction:
        """Predict that the sequence runs to its limit."""
        self._num_predictions += 1
        remaining = max(0, request.max_length - request.current_length)
        return LifetimePrediction(remaining_length=remaining, estimated_time=0.0, confidence=0.0)

    def update(self, *, sequence_id: str, actual_length: int, actual_time: float) -> None:
        """Learn nothing."""
        check_observation(actual_length=actual_length, actual_time=actual_time)
        self._num_updates += 1

    def metrics(self) -> LifetimeMetrics:
        """Return the number of calls; no prediction is based on an observation, so none is scored."""
        return LifetimeMetrics(num_predictions=self._num_predictions, num_updates=self._num_updates)
