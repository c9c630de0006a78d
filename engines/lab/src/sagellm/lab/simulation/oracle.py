"""A lifetime predictor that knows the recorded lengths, and errs as much as it is told to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from random import Random

from sagellm.core import (
    ConfigError,
    LifetimeMetrics,
    LifetimePrediction,
    LifetimePredictorProtocol,
    PredictionRequest,
    SequenceId,
)
from sagellm.core.protocols.lifetime import check_observation

MAX_ERROR = 10
"""Two predictions of the same length then differ more than ten thousand times, as often as not."""


class OraclePredictor(LifetimePredictorProtocol):
    """Predicts each recorded length × e^x, x normally distributed with standard deviation `error`.

    An upper bound for policies that use predictions: no engine has it. `confidence` is the share of its
    predictions that are within 10 %: 1 without an error.
    """

    def __init__(self, output_lens: Mapping[SequenceId, int], *, error: float = 0.0, seed: int = 0) -> None:
        if not 0 <= error <= MAX_ERROR:
            raise ConfigError(f"the oracle's error is {error}; it must be a number from 0 to {MAX_ERROR}")
        self._output_lens, self._error, self._seed = output_lens, error, seed
        self._confidence = math.erf(math.log(1.1) / (error * math.sqrt(2))) if error else 1.0
        self._num_predictions = self._num_updates = 0

    def predict(self, request: PredictionRequest) -> LifetimePrediction:
        """Predict what remains; equal questions get equal answers."""
        self._num_predictions += 1
        noise = Random(f"oracle {self._seed} {request.sequence_id}").gauss(0.0, self._error)
        length = self._output_lens[SequenceId(request.sequence_id)] * math.exp(noise)
        limit = max(0, request.max_length - request.current_length)
        remaining = min(max(0.0, length - request.current_length), limit)
        return LifetimePrediction(remaining_length=remaining, estimated_time=0.0, confidence=self._confidence)

    def update(self, *, sequence_id: str, actual_length: int, actual_time: float) -> None:
        """Learn nothing."""
        del sequence_id
        check_observation(actual_length=actual_length, actual_time=actual_time)
        self._num_updates += 1

    def metrics(self) -> LifetimeMetrics:
        """Return the number of calls."""
        return LifetimeMetrics(num_predictions=self._num_predictions, num_updates=self._num_updates)
