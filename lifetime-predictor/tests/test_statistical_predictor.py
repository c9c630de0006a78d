"""Predictions follow what is known of requests, and say how sure they are."""

from __future__ import annotations

import logging
import random

import pytest

from sagellm.core import ConfigError, LifetimePrediction, PredictionRequest
from sagellm.core.protocols.prefix_cache import PrefixAnswers
from sagellm.kvmgr.lifetime import StatisticalLifetimePredictor
from sagellm.kvmgr.lifetime.sources import bucket_of
from sagellm.testing import LifetimePredictorContract


class TestStatisticalLifetimePredictor(LifetimePredictorContract):
    def make(self):
        return StatisticalLifetimePredictor()


def request(sequence_id="x", num_tokens=10, current_length=0, max_length=1 << 17, answers=(), tenant=""):
    return PredictionRequest(
        sequence_id=sequence_id,
        token_ids=range(num_tokens),
        current_length=current_length,
        max_length=max_length,
        answers=answers,
        tenant=tenant,
    )


def answered(*lengths, num_tokens=8):
    return (PrefixAnswers(num_tokens, len(lengths), lengths[-8:], 0),)


def teach(predictor, lengths, **fields):
    for index, length in enumerate(lengths):
        name = f"taught {index} {fields}"
        predictor.predict(request(name, **fields))
        predictor.update(sequence_id=name, actual_length=length, actual_time=0.05 * length)


def near(length, share=0.1):
    return pytest.approx(length, rel=share)


def test_prompts_of_other_lengths_and_other_clients_have_their_own_outputs():
    predictor = StatisticalLifetimePredictor()
    for _ in range(10):
        teach(predictor, [400] * 5, num_tokens=1000)
        teach(predictor, [30] * 5, num_tokens=10)
        teach(predictor, [150] * 5, num_tokens=1000, tenant="b")
    assert predictor.predict(request(num_tokens=1000)).remaining_length == near(400)
    assert predictor.predict(request(num_tokens=10)).remaining_length == near(30)
    assert predictor.predict(request(num_tokens=1000, tenant="b")).remaining_length == near(150)


def test_answers_to_the_same_prefix_count_most():
    predictor, rng = StatisticalLifetimePredictor(), random.Random(0)
    for _ in range(200):
        length = rng.randrange(20, 2000)
        teach(predictor, [length], answers=answered(length))
    for length in (50, 300, 1500):
        found = predictor.predict(request(answers=answered(length)))
        assert found.remaining_length == near(length)
        assert found.confidence > 0.9
    assert predictor.predict(request()).confidence < 0.85  # a median against known lengths: 0.75


def test_what_was_never_right_counts_little():
    predictor, rng = StatisticalLifetimePredictor(), random.Random(0)
    for _ in range(300):
        teach(predictor, [200 + rng.randrange(10)], answers=answered(rng.randrange(20, 2000)))
    assert predictor.predict(request(answers=answered(1900))).remaining_length == near(205)


def test_what_remains_is_conditional_on_what_is_there():
    predictor = StatisticalLifetimePredictor()
    teach(predictor, [20, 20, 20, 300, 300] * 20)
    assert predictor.predict(request()).remaining_length == near(20, 0.2)
    assert predictor.predict(request()).low == near(20)
    assert predictor.predict(request()).high == near(300)
    later = predictor.predict(request(current_length=60))
    assert later.remaining_length == near(240, 0.15)
    assert later.low > 150
    far = predictor.predict(request(current_length=3000, max_length=50_000))
    assert 500 < far.remaining_length < 10_000  # as long again, where nothing is known


def test_the_mean_of_what_remains_counts_long_outputs_too():
    predictor = StatisticalLifetimePredictor()
    teach(predictor, [20, 20, 20, 300, 300] * 40)
    assert predictor.predict(request()).mean == near(132)  # the median is 20
    assert predictor.predict(request(current_length=60)).mean == near(240, 0.15)
    assert predictor.predict(request(max_length=100)).mean == near(52)  # (3 · 20 + 2 · 100) / 5


@pytest.mark.parametrize("spread", [0.2, 1.0])
def test_intervals_hold_eight_of_ten_lengths_and_follow_when_that_changes(spread):
    predictor, rng = StatisticalLifetimePredictor(), random.Random(1)
    num_covered = 0
    for index in range(3000):
        found = predictor.predict(request(str(index)))
        sigma = spread if index < 1500 else 2 * spread
        length = max(1, round(rng.lognormvariate(5, sigma)))
        if index >= 500:
            num_covered += found.low <= length <= found.high
        predictor.update(sequence_id=str(index), actual_length=length, actual_time=1.0)
    assert 0.77 < num_covered / 2500 < 0.83
    assert predictor.metrics().coverage == pytest.approx(0.8, abs=0.03)


def test_confidence_is_how_often_orders_are_right():
    predictor, rng = StatisticalLifetimePredictor(), random.Random(2)
    seen = []
    for index in range(4000):
        hint = rng.lognormvariate(5, 1)
        length = max(1, round(hint * rng.lognormvariate(0, 0.3 if index % 2 else 1.5)))
        answers = answered(round(hint)) if index % 2 else answered(round(hint), round(hint))
        found = predictor.predict(request(str(index), answers=answers))
        seen.append((found.remaining_length, length, found.confidence))
        predictor.update(sequence_id=str(index), actual_length=length, actual_time=1.0)
    seen = seen[2000:]
    for kind in (0, 1):
        ones = seen[kind::2]
        right = []
        for guess, length, _ in ones:
            other = rng.choice(seen)
            if other[0] != guess and other[1] != length:
                right.append((guess < other[0]) == (length < other[1]))
        claimed = sum(confidence for _, _, confidence in ones) / len(ones)
        assert claimed == pytest.approx(sum(right) / len(right), abs=0.05)


def test_confidence_recovers_from_wrong_orders_while_many_sequences_run():
    predictor, rng = StatisticalLifetimePredictor(), random.Random(0)
    for _ in range(20):
        length = rng.randrange(20, 2000)
        teach(predictor, [length], answers=answered(length))
    right, wrong = ([rng.randrange(20, 2000) for _ in range(number)] for number in (300, 30))
    for name, lengths in (("right", right), ("wrong", wrong)):
        for index, length in enumerate(lengths):
            predictor.predict(request(f"{name} {index}", answers=answered(length)))
    for index, length in enumerate(wrong):
        predictor.update(sequence_id=f"wrong {index}", actual_length=2020 - length, actual_time=1.0)
    for index, length in enumerate(right):
        predictor.update(sequence_id=f"right {index}", actual_length=length, actual_time=1.0)
    assert predictor.predict(request(answers=answered(50))).confidence > 0.8


def test_nothing_known_is_the_limit_without_confidence():
    assert StatisticalLifetimePredictor().predict(request(max_length=500)) == LifetimePrediction(
        remaining_length=500, estimated_time=0.0, confidence=0.0
    )


def test_outputs_that_were_cut_teach_that_they_would_have_been_longer():
    predictor = StatisticalLifetimePredictor()
    teach(predictor, [100] * 200, max_length=100)
    assert predictor.predict(request(max_length=100)).remaining_length == 100
    assert predictor.predict(request(max_length=10_000)).remaining_length > 150
    assert predictor.metrics().num_cut == 200
    assert predictor.metrics().num_scored == 0


def test_the_time_follows_the_seconds_per_token():
    predictor = StatisticalLifetimePredictor()
    teach(predictor, [100] * 50)
    found = predictor.predict(request())
    assert found.estimated_time == pytest.approx(0.05 * found.remaining_length)


def test_sequences_that_never_end_are_dropped_once_there_are_too_many(caplog):
    predictor = StatisticalLifetimePredictor(max_sequences=3)
    with caplog.at_level(logging.INFO):
        for index in range(10):
            predictor.predict(request(str(index)))
    assert predictor.num_live_sequences == 3
    assert len([each for each in caplog.messages if "count as aborted" in each]) == 1
    predictor.update(sequence_id="0", actual_length=5, actual_time=1.0)
    assert predictor.metrics().num_scored == 0


def test_predictions_worse_than_a_constant_are_reported(caplog):
    predictor, rng = StatisticalLifetimePredictor(), random.Random(3)
    with caplog.at_level(logging.INFO):
        teach(predictor, [rng.choice([10, 1000]) for _ in range(1000)])
    assert any("1000 sequences have ended" in each for each in caplog.messages)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3"], ids=repr)
def test_impossible_options_are_refused(value):
    with pytest.raises(ConfigError, match="max_sequences"):
        StatisticalLifetimePredictor(max_sequences=value)


def test_buckets_are_parts_of_octaves():
    assert [bucket_of(number, 4) for number in range(20)] == [
        *(0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 12, 12)
    ]
    for parts in (4, 32):
        found = [bucket_of(number, parts) for number in range(5000)]
        assert found == sorted(found)
        assert set(found) == set(range(found[-1] + 1))
