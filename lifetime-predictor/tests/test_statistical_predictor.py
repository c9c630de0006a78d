from __future__ import annotations

import random
from itertools import pairwise

import pytest

from sagellm.core import (
    ConfigError,
    LifetimePrediction,
    LifetimePredictorProtocol,
    PredictionRequest,
    SequenceId,
    pack,
)
from sagellm.kvmgr.lifetime import StatisticalLifetimePredictor
from sagellm.kvmgr.lifetime.statistical import bucket_of
from sagellm.testing import LifetimePredictorContract


class TestStatisticalLifetimePredictor(LifetimePredictorContract):
    budget_us = 500.0  # a tenth is what it may cost; the rest is for slow machines

    def make(self) -> LifetimePredictorProtocol:
        return StatisticalLifetimePredictor()


def ask(
    predictor: StatisticalLifetimePredictor,
    sequence_id: str,
    num_tokens: int,
    current_length: int = 0,
    max_length: int = 1 << 30,
) -> LifetimePrediction:
    return predictor.predict(
        PredictionRequest(
            sequence_id=SequenceId(sequence_id),
            token_ids=pack(range(num_tokens)),
            current_length=current_length,
            max_length=max_length,
        )
    )


def end(predictor: StatisticalLifetimePredictor, sequence_id: str, length: int, time_s: float = 1.0) -> None:
    predictor.update(sequence_id=SequenceId(sequence_id), actual_length=length, actual_time=time_s)


def teach(predictor: StatisticalLifetimePredictor, num_tokens: int, lengths: list[int]) -> None:
    for index, length in enumerate(lengths):
        sequence_id = f"taught-{num_tokens}-{index}"
        ask(predictor, sequence_id, num_tokens)
        end(predictor, sequence_id, length, time_s=0.05 * length)


def test_a_bucket_speaks_once_it_has_seen_enough() -> None:
    predictor = StatisticalLifetimePredictor(min_observations=3)
    teach(predictor, 1000, [400] * 5)
    teach(predictor, 10, [20, 30])
    assert ask(predictor, "x", 10).remaining_length == 400  # the median of all seven
    teach(predictor, 10, [40])
    assert ask(predictor, "x", 10).remaining_length == 30
    assert ask(predictor, "y", 1000).remaining_length == 400


def test_what_remains_is_conditional_on_what_is_there() -> None:
    predictor = StatisticalLifetimePredictor(min_observations=2)
    teach(predictor, 10, [10, 20, 100, 200, 300])
    assert ask(predictor, "x", 10, current_length=0).remaining_length == 100
    assert ask(predictor, "x", 10, current_length=20).remaining_length == 200 - 20
    assert ask(predictor, "x", 10, current_length=150).remaining_length == 250 - 150


def test_beyond_all_that_was_seen_the_limit_is_predicted_without_confidence() -> None:
    predictor = StatisticalLifetimePredictor()
    teach(predictor, 10, [10] * 20)
    prediction = ask(predictor, "x", 10, current_length=10, max_length=500)
    assert (prediction.remaining_length, prediction.confidence) == (490, 0)


def test_the_limit_cuts_the_prediction() -> None:
    predictor = StatisticalLifetimePredictor()
    teach(predictor, 10, list(range(100, 140)))
    prediction = ask(predictor, "x", 10, current_length=5, max_length=50)
    assert prediction.remaining_length == 45
    assert prediction.confidence == 40 / 42  # all of them are cut there


def test_confidence_is_the_share_of_near_lengths() -> None:
    predictor = StatisticalLifetimePredictor()
    teach(predictor, 10, [90, 92, 95, 100, 104, 111, 112, 10, 300])
    # Good is an error of at most 10 % of the true length: true lengths from 90.9 to 111.1.
    prediction = ask(predictor, "x", 10)
    assert prediction.remaining_length == 100
    assert prediction.confidence == 5 / (9 + 2)


def test_confidence_allows_five_tokens_for_short_outputs() -> None:
    predictor = StatisticalLifetimePredictor()
    teach(predictor, 10, [4, 5, 8, 10, 12, 15, 16])
    assert ask(predictor, "x", 10).confidence == 5 / (7 + 2)


def test_few_observations_give_little_confidence() -> None:
    predictor = StatisticalLifetimePredictor()
    confidences = []
    for index in range(20):
        teach(predictor, index + 1, [50])
        confidences.append(ask(predictor, "x", 10).confidence)
    assert confidences[0] == pytest.approx(1 / 3)
    assert confidences[6] < 0.8 < confidences[19]
    assert confidences == sorted(confidences)


def test_confidence_is_as_high_as_predictions_are_good() -> None:
    rng = random.Random(0)
    predictor = StatisticalLifetimePredictor()
    sum_confidence, num_good, num_asked = 0.0, 0, 4000
    for index in range(num_asked):
        num_tokens = rng.choice([20, 100, 1500])
        length = max(1, round(rng.gauss(num_tokens / 2, 10)))
        prediction = ask(predictor, str(index), num_tokens)
        sum_confidence += prediction.confidence
        num_good += abs(prediction.remaining_length - length) <= max(0.1 * length, 5)
        end(predictor, str(index), length)
    assert sum_confidence / num_asked == pytest.approx(num_good / num_asked, abs=0.02)


def test_time_is_tokens_times_the_median_pace() -> None:
    predictor = StatisticalLifetimePredictor()
    assert ask(predictor, "x", 10, max_length=9).estimated_time == 0
    for index, time_s in enumerate([1.0, 2.0, 50.0]):
        end(predictor, str(index), 100, time_s)
    assert ask(predictor, "x", 10).estimated_time == pytest.approx(100 * 0.02)


def test_an_output_of_no_tokens_teaches_no_pace() -> None:
    predictor = StatisticalLifetimePredictor()
    end(predictor, "a", 0, 3.0)
    assert ask(predictor, "x", 10, max_length=9).estimated_time == 0


def test_only_the_latest_lengths_count() -> None:
    predictor = StatisticalLifetimePredictor(window=10)
    teach(predictor, 10, [500] * 50)
    teach(predictor, 10, [20] * 10)
    assert ask(predictor, "x", 10).remaining_length == 20


def test_errors_are_those_of_the_prediction_made_at_admission() -> None:
    predictor = StatisticalLifetimePredictor()
    teach(predictor, 10, [100] * 8)
    before = predictor.metrics()
    ask(predictor, "x", 10)
    ask(predictor, "x", 10, current_length=50)
    ask(predictor, "x", 10, current_length=110)
    end(predictor, "x", 120)
    after = predictor.metrics()
    assert after.num_predictions == before.num_predictions + 3
    assert (before.mae_tokens, before.num_scored, after.num_scored) == (0, 7, 8)
    assert after.mae_tokens == pytest.approx(20 / 8)  # the first of the eight stood on nothing
    assert (before.within_10_percent, after.within_10_percent) == (1, 7 / 8)


def test_an_id_may_be_used_again() -> None:
    predictor = StatisticalLifetimePredictor()
    teach(predictor, 10, [100] * 8)
    ask(predictor, "x", 1000, current_length=0, max_length=5)
    ask(predictor, "x", 10)
    end(predictor, "x", 100)
    assert predictor.metrics().mae_tokens == 0


def test_what_the_limit_cut_is_not_scored() -> None:
    predictor = StatisticalLifetimePredictor()
    for index in range(20):
        ask(predictor, f"cut-{index}", 10, max_length=16)
        end(predictor, f"cut-{index}", 16)
    metrics = predictor.metrics()
    assert (metrics.num_updates, metrics.num_cut, metrics.num_scored) == (20, 20, 0)
    assert (metrics.mae_tokens, metrics.median_mae_tokens, metrics.within_10_percent) == (None, None, None)
    ask(predictor, "whole", 10, max_length=100)
    end(predictor, "whole", 20)
    metrics = predictor.metrics()
    assert (metrics.num_scored, metrics.mae_tokens, metrics.within_10_percent) == (1, 4, 0)


def test_the_error_of_the_best_constant_stands_beside() -> None:
    predictor = StatisticalLifetimePredictor()
    lengths = [30, 10, 10, 200, 40]
    teach(predictor, 10, lengths)  # the first stands on nothing and is not scored
    best = min(sum(abs(length - constant) for length in lengths[1:]) / 4 for constant in range(201))
    assert predictor.metrics().median_mae_tokens == pytest.approx(best)


def test_an_unknown_sequence_teaches_all_prompts_together() -> None:
    predictor = StatisticalLifetimePredictor()
    end(predictor, "never asked", 70)
    assert ask(predictor, "x", 10).remaining_length == 70
    assert predictor.metrics().num_scored == 0


def test_an_aborted_sequence_that_it_is_told_of_takes_no_room() -> None:
    predictor = StatisticalLifetimePredictor()
    for index in range(1000):
        ask(predictor, f"aborted-{index}", 10)
        predictor.forget(sequence_id=SequenceId(f"aborted-{index}"))
        assert predictor.num_live_sequences == 0
    predictor.forget(sequence_id=SequenceId("never asked"))


def test_aborted_sequences_are_forgotten() -> None:
    predictor = StatisticalLifetimePredictor(max_sequences=100)
    for index in range(1000):
        ask(predictor, f"aborted-{index}", 10)
        ask(predictor, "long", 10, current_length=index)
        assert predictor.num_live_sequences <= 100
    end(predictor, "long", 1000)
    assert predictor.num_live_sequences == 99
    assert predictor.metrics().num_updates == 1


def test_a_prompt_may_be_any_sequence_of_tokens() -> None:
    predictor = StatisticalLifetimePredictor()
    for tokens in ([], [1, 2, 3], range(100_000)):
        request = PredictionRequest(sequence_id=SequenceId("x"), token_ids=tokens, max_length=7)
        assert predictor.predict(request).remaining_length == 7


def test_buckets_are_quarters_of_octaves() -> None:
    buckets = [bucket_of(num_tokens) for num_tokens in range(1 << 15)]
    assert buckets[:12] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 9, 9]
    assert all(later - earlier in (0, 1) for earlier, later in pairwise(buckets))
    assert {n for n, bucket in enumerate(buckets) if bucket == bucket_of(300)} == set(range(256, 320))


@pytest.mark.parametrize("name", ["window", "min_observations", "max_sequences"])
@pytest.mark.parametrize("value", [0, -1, True, 1.5, None])
def test_an_option_that_is_no_count_is_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value!r}"):
        StatisticalLifetimePredictor(**{name: value})  # type: ignore[arg-type]


def test_the_log_says_when_predictions_are_worse_than_the_median_and_when_no_longer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "sagellm.kvmgr.lifetime")
    predictor = StatisticalLifetimePredictor(window=4, min_observations=1)
    assert caplog.messages.pop().startswith("output lengths are predicted from the last 4")
    caplog.clear()
    teach(predictor, 10, [10, 200] * 500)  # what came last says the opposite of what comes next
    (message,) = caplog.messages
    assert message.startswith("1000 sequences have ended; the mean error of predictions is ")
    assert message.endswith("output lengths do not follow prompt lengths here")
    caplog.clear()
    teach(predictor, 10, [10, 200] * 500)
    assert not caplog.messages, "what was said is not said again"
    teach(predictor, 10, [1000] * 4000)
    assert ["not above" in message for message in caplog.messages] == [True]


def test_the_log_says_once_that_sequences_are_taken_for_aborted(caplog: pytest.LogCaptureFixture) -> None:
    predictor = StatisticalLifetimePredictor(max_sequences=2)
    caplog.set_level("INFO", "sagellm.kvmgr.lifetime")
    for number in range(5):
        ask(predictor, f"never-ending-{number}", 10)
    assert [message.partition(":")[0] for message in caplog.messages] == [
        "more than 2 sequences have not ended"
    ]
