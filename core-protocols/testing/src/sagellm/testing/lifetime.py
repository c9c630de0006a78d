"""What every lifetime predictor must do. Subclass `LifetimePredictorContract` and override `make`."""

from __future__ import annotations

import math
import random
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from sagellm.core.errors import ConfigError, InvalidInputError
from sagellm.core.ids import SequenceId
from sagellm.core.protocols.lifetime import LifetimePrediction, LifetimePredictorProtocol, PredictionRequest
from sagellm.core.protocols.prefix_cache import PrefixAnswers
from sagellm.core.tokens import pack
from sagellm.testing.cost import cpu_ns, slowness


def ask(
    sequence_id: str = "a",
    num_tokens: int = 8,
    current_length: int = 0,
    max_length: int = 1 << 30,
    rng: random.Random | None = None,
) -> PredictionRequest:
    """Ask about a sequence with a prompt of this length, of which answers are known if `rng` says so."""
    answers: list[PrefixAnswers] = []
    while rng is not None and len(answers) < 6 and rng.random() < 0.5:
        lengths = tuple(rng.choice([0, rng.randrange(3000)]) for _ in range(rng.randint(1, 8)))
        answers.append(PrefixAnswers(num_tokens >> len(answers), rng.randint(len(lengths), 99), lengths, 5))
    return PredictionRequest(
        sequence_id=SequenceId(sequence_id),
        token_ids=pack(range(num_tokens)),
        current_length=current_length,
        max_length=max_length,
        tenant="" if rng is None else rng.choice("ab"),
        answers=answers,
        arrival_ns=0 if rng is None else rng.randrange(1 << 40),
    )


def check_bounds(request: PredictionRequest, prediction: LifetimePrediction) -> None:
    """Assert what must hold for every prediction."""
    limit = max(0, request.max_length - request.current_length)
    assert 0 <= prediction.remaining_length <= limit
    assert 0 <= prediction.confidence <= 1
    assert math.isfinite(prediction.estimated_time)
    assert prediction.estimated_time >= 0
    if prediction.low is not None or prediction.high is not None:
        assert prediction.low is not None
        assert prediction.high is not None
        assert 0 <= prediction.low <= prediction.remaining_length <= prediction.high <= limit
    assert prediction.mean is None or 0 <= prediction.mean <= limit


class LifetimePredictorContract:
    """The contract of LifetimePredictorProtocol as tests."""

    budget_us = 1000.0  # of CPU time for a call, best of many, on a server of 2023

    def make(self) -> LifetimePredictorProtocol:
        """Return a fresh predictor."""
        raise NotImplementedError

    def run_random_calls(
        self, predictor: LifetimePredictorProtocol, seed: int = 0
    ) -> list[LifetimePrediction]:
        """Make two thousand calls in random order, also with sequences that never end."""
        rng = random.Random(seed)
        predictions = []
        for step in range(1000):
            sequence_id = f"s{rng.randrange(step + 1)}"
            current = rng.choice([0, 0, rng.randrange(300)])
            request = ask(
                sequence_id, rng.randrange(2000), current, rng.choice([1 << 30, rng.randrange(400)]), rng
            )
            predictions.append(predictor.predict(request))
            check_bounds(request, predictions[-1])
            if rng.random() < 0.8:
                actual_length = rng.randrange(500)
                predictor.update(
                    sequence_id=SequenceId(f"s{rng.randrange(step + 1)}"),
                    actual_length=actual_length,
                    actual_time=0.02 * actual_length * rng.random(),
                )
        return predictions

    def test_a_fresh_predictor_predicts(self) -> None:
        """It has no data, so it is not confident."""
        predictor = self.make()
        request = ask(max_length=100)
        prediction = predictor.predict(request)
        check_bounds(request, prediction)
        assert prediction.confidence <= 0.5
        assert predictor.metrics().num_scored == 0
        assert predictor.metrics().mae_tokens is None

    def test_predictions_stay_within_their_bounds(self) -> None:
        """Whatever the order of the calls."""
        predictor = self.make()
        self.run_random_calls(predictor)
        metrics = predictor.metrics()
        assert metrics.num_predictions == 1000
        assert 0 < metrics.num_updates <= 1000
        assert 0 <= metrics.num_scored <= metrics.num_updates
        for error in (metrics.mae_tokens, metrics.median_mae_tokens):
            assert error is None or 0 <= error < math.inf
        assert metrics.within_10_percent is None or 0 <= metrics.within_10_percent <= 1

    def test_nothing_remains_at_the_limit(self) -> None:
        """Nor beyond it."""
        predictor = self.make()
        predictor.update(sequence_id=SequenceId("old"), actual_length=500, actual_time=5.0)
        for current in (100, 130):
            prediction = predictor.predict(ask(current_length=current, max_length=100))
            assert prediction.remaining_length == 0
            assert prediction.estimated_time == 0

    def test_equal_calls_give_equal_answers(self) -> None:
        """Two predictors with equal calls agree, and neither affects the other."""
        first, second = self.make(), self.make()
        before = second.predict(ask("x"))
        predictions = self.run_random_calls(first)
        assert second.predict(ask("x")) == before
        third = self.make()
        assert self.run_random_calls(third) == predictions

    def test_a_batch_is_asked_about_as_one_after_another(self) -> None:
        """New sequences and running ones, in one call or in many."""
        together, alone = self.make(), self.make()
        for predictor in (together, alone):
            self.run_random_calls(predictor)
        asked = [ask(f"batch {number % 20}", 50 * number, number // 20 * 30, 400) for number in range(60)]
        found = [
            each for start in range(0, 60, 20) for each in together.predict_all(asked[start : start + 20])
        ]
        one_by_one = [alone.predict(each) for each in asked]
        for request, prediction, expected in zip(asked, found, one_by_one, strict=True):
            check_bounds(request, prediction)
            assert prediction.remaining_length == pytest.approx(expected.remaining_length)
            assert prediction.confidence == pytest.approx(expected.confidence)
        assert together.predict_all([]) == []
        assert together.metrics().num_predictions == alone.metrics().num_predictions

    @pytest.mark.parametrize("value", [-1, 1.5, True, "1", None], ids=repr)
    def test_a_length_that_is_no_count_is_refused(self, value: Any) -> None:
        """In the request and in the observation."""
        for name in ("current_length", "max_length"):
            with pytest.raises(InvalidInputError, match=name):
                PredictionRequest(sequence_id=SequenceId("a"), token_ids=[1], **{name: value})
        predictor = self.make()
        with pytest.raises(InvalidInputError, match="actual_length"):
            predictor.update(sequence_id=SequenceId("a"), actual_length=value, actual_time=1.0)
        assert predictor.metrics().num_updates == 0

    @pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, True, "1", None], ids=repr)
    def test_a_time_that_is_no_duration_is_refused(self, value: Any) -> None:
        """And nothing is learnt from it."""
        predictor = self.make()
        with pytest.raises(InvalidInputError, match="actual_time"):
            predictor.update(sequence_id=SequenceId("a"), actual_length=1, actual_time=value)
        assert predictor.metrics().num_updates == 0

    def test_an_unknown_sequence_may_end(self) -> None:
        """Requests that were never asked about end too."""
        predictor = self.make()
        predictor.update(sequence_id=SequenceId("never asked"), actual_length=3, actual_time=0.1)
        assert predictor.metrics().num_updates == 1

    def test_an_aborted_sequence_is_forgotten_and_teaches_nothing(self) -> None:
        """Asked about or not, and as often as it comes."""
        predictor = self.make()
        predictor.predict(ask("aborted", 10))
        for sequence_id in ("aborted", "aborted", "never asked"):
            predictor.forget(sequence_id=SequenceId(sequence_id))
        assert predictor.metrics().num_updates == 0

    def test_it_is_trained_on_examples_or_says_that_it_is_not(self) -> None:
        """What cannot be trained says so, and so does what gets too few examples: no file is left."""
        predictor = self.make()
        with TemporaryDirectory() as folder:
            with pytest.raises(ConfigError):
                predictor.train([(ask(), 5)], Path(folder) / "weights")
            assert list(Path(folder).iterdir()) == []

    def test_it_costs_little(self) -> None:
        """Both calls stay under a millisecond after many sequences."""
        predictor = self.make()
        self.run_random_calls(predictor)
        request = ask("timed", 1000)

        def predict() -> None:
            predictor.predict(request)

        def update() -> None:
            predictor.update(sequence_id=request.sequence_id, actual_length=100, actual_time=1.0)

        costs_ns = [(cpu_ns(predict), cpu_ns(update)) for _ in range(100)]
        assert max(map(min, zip(*costs_ns, strict=True))) / 1000 < self.budget_us * slowness()
