"""What learns: the order of outputs, corrections of another predictor, and networks."""

from __future__ import annotations

import random

import pytest

from sagellm.core import ConfigError, PluginError, PredictionRequest, UnknownProviderError
from sagellm.core.protocols.prefix_cache import PrefixAnswers
from sagellm.kvmgr.lifetime import OnlineLifetimePredictor, RankingLifetimePredictor
from sagellm.kvmgr.lifetime.features import MAX_TEXT, features_of
from sagellm.kvmgr.lifetime.online import Drift
from sagellm.testing import LifetimePredictorContract

LONG, SHORT = 17, 23  # words that say how long the output will be


class TestRankingLifetimePredictor(LifetimePredictorContract):
    def make(self):
        return RankingLifetimePredictor()


class TestOnlineLifetimePredictor(LifetimePredictorContract):
    def make(self):
        return OnlineLifetimePredictor()


class TestOnlineRankingLifetimePredictor(LifetimePredictorContract):
    def make(self):
        return OnlineLifetimePredictor(base="ranker", base_options={"max_sequences": 2000})


def asked(sequence_id, words, max_length=1 << 17, **fields):
    return PredictionRequest(sequence_id=sequence_id, token_ids=words, max_length=max_length, **fields)


def prompt(rng, word):
    words = [rng.randrange(100, 2000) for _ in range(20)]
    words[rng.randrange(20)] = word
    return words


def length_of(rng, word):
    return round(rng.lognormvariate(6 if word == LONG else 3, 0.3))


def errors_of(predictor, num_requests, seed=0, factor=lambda index: 1.0):
    """Serve requests whose words tell the lengths, and return the relative error of each."""
    rng, errors = random.Random(seed), []
    for index in range(num_requests):
        word = rng.choice([LONG, SHORT])
        found = predictor.predict(asked(str(index), prompt(rng, word)))
        length = max(1, round(factor(index) * length_of(rng, word)))
        errors.append(abs(found.remaining_length - length) / length)
        predictor.update(sequence_id=str(index), actual_length=length, actual_time=1.0)
    return errors


def mean(values):
    return sum(values) / len(values)


def test_the_order_of_outputs_is_learnt_from_words():
    predictor, rng = RankingLifetimePredictor(), random.Random(9)
    errors = errors_of(predictor, 1500)
    assert mean(errors[1000:]) < 0.5
    pairs = []
    for index in range(200):
        found = [
            predictor.predict(asked(f"{index} {word}", prompt(rng, word))).remaining_length
            for word in (SHORT, LONG)
        ]
        pairs.append(found[0] < found[1])
    assert mean(pairs) > 0.95


def test_outputs_that_were_cut_are_not_ranked_by_the_length_at_which_they_were():
    predictor, rng = RankingLifetimePredictor(), random.Random(4)
    for index in range(600):
        word, limit = (LONG, 10) if index % 2 else (SHORT, 1 << 17)
        predictor.predict(asked(str(index), prompt(rng, word), limit))
        length = min(limit, length_of(rng, word))
        predictor.update(sequence_id=str(index), actual_length=length, actual_time=1.0)
    pairs = [
        [predictor.predict(asked(f"{index} {word}", prompt(rng, word))) for word in (SHORT, LONG)]
        for index in range(100)
    ]
    assert mean([short.remaining_length > long.remaining_length for short, long in pairs]) < 0.6


def test_what_another_predictor_learnt_is_kept_while_lengths_stay():
    predictor = OnlineLifetimePredictor(base="ranker")
    errors_of(predictor, 1500)
    assert predictor.num_drifts == 0


def test_what_was_learnt_is_forgotten_when_lengths_change():
    predictor = OnlineLifetimePredictor(base="ranker")
    errors = errors_of(predictor, 3000, factor=lambda index: 1.0 if index < 1500 else 8.0)
    assert predictor.num_drifts >= 1
    assert mean(errors[1500:1540]) > 0.7
    assert mean(errors[2500:]) < 0.5


def test_growing_errors_are_noticed_and_steady_ones_are_not():
    rng, drift = random.Random(0), Drift()
    assert not any(drift.is_after(rng.gauss(5, 1)) for _ in range(5000))
    num_seen = next(number for number in range(1, 500) if drift.is_after(rng.gauss(7, 1)))
    assert num_seen < 40


def serve(predictor, name, length):
    predictor.predict(asked(name, range(20)))
    predictor.update(sequence_id=name, actual_length=length, actual_time=1.0)


def test_outliers_are_no_drift_and_longer_outputs_are():
    predictor = OnlineLifetimePredictor()
    for index in range(600):
        serve(predictor, str(index), 100_000 if index % 60 == 59 else 50)
    assert predictor.num_drifts == 0
    for index in range(20):
        serve(predictor, f"longer {index}", 150)
    assert predictor.num_drifts == 1


@pytest.mark.parametrize("num_seen", [100, 300, 5000])
def test_errors_that_are_three_deviations_larger_are_noticed_after_some_15(num_seen):
    rng, drift = random.Random(num_seen), Drift()
    assert not any(drift.is_after(rng.gauss(10, 3)) for _ in range(num_seen))
    noticed = next(number for number in range(1, 500) if drift.is_after(rng.gauss(19, 3)))
    assert 8 <= noticed <= 20


def test_what_ran_when_lengths_changed_teaches_the_new_predictor_nothing_but_its_length():
    predictor = OnlineLifetimePredictor()
    for index in range(200):
        serve(predictor, str(index), 50)
    for index in range(200):
        predictor.predict(asked(f"running {index}", range(20)))
    for index in range(100):
        if not predictor.num_drifts:
            serve(predictor, f"longer {index}", 500)
    assert predictor.num_drifts == 1
    for index in range(200):
        predictor.update(sequence_id=f"running {index}", actual_length=500, actual_time=1.0)
    found = predictor.predict(asked("new", range(20)))
    assert found.remaining_length == pytest.approx(500, rel=0.1)
    assert found.confidence == 0.5, "the new predictor has put no two outputs in order"
    assert predictor.num_drifts == 1
    assert predictor.metrics().num_scored > 400


def test_a_predictor_to_correct_must_exist():
    with pytest.raises(UnknownProviderError, match="nonsense"):
        OnlineLifetimePredictor(base="nonsense")
    with pytest.raises((ConfigError, PluginError), match="speed"):
        OnlineLifetimePredictor(base="statistical", base_options={"speed": 3})


def test_features_are_of_the_end_of_the_prompt_and_of_the_longest_prefixes():
    answers = [PrefixAnswers(90 - number, 3, (5, 6, 7), 10**9) for number in range(9)]
    found = features_of(asked("x", range(100), answers=answers, arrival_ns=10**9 + 10**10))
    assert len(found.text) == MAX_TEXT
    assert found.text.tolist() == list(range(100 - MAX_TEXT + 1, 101))
    assert found.levels.shape == (4, 8)
    assert found.levels[0, -1] == pytest.approx(2.302585 - 3)  # ten seconds ago
    assert features_of(asked("x", [7] * 30)).text.tolist() == []
    assert features_of(asked("x", [])).levels.shape == (0, 8)
