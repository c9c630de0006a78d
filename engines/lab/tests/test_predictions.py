"""The engine scores every lifetime predictor, also one from outside that counts nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from sagellm.core import (
    LifetimeMetrics,
    LifetimePrediction,
    LifetimePredictorProtocol,
    PluginRegistry,
    Provider,
    StepCost,
    TraceRequest,
    hookimpl,
)
from sagellm.engines import EngineConfig, SamplingParams
from sagellm.lab.simulation.serving import simulate_serving
from sagellm.lab.simulation.step_costs import StepCosts

COST = StepCost(base_ns=1e6, token_ns=1e4)
COSTS = StepCosts(source="by hand", device="cuda", step=COST, kv_bytes_per_token=1000)


@dataclass(frozen=True, kw_only=True)
class OwnMetrics(LifetimeMetrics):
    num_questions: int = 0


class Constant(LifetimePredictorProtocol):
    """Always predicts the same, and counts questions alone."""

    def __init__(self, *, length: float = 8.0, confidence: float = 1.0) -> None:
        self._length, self._confidence = length, confidence
        self._num_questions = 0

    def predict(self, request):
        self._num_questions += 1
        return LifetimePrediction(
            remaining_length=self._length, estimated_time=0.0, confidence=self._confidence
        )

    def update(self, *, sequence_id, actual_length, actual_time):
        pass

    def metrics(self):
        return OwnMetrics(num_predictions=0, num_updates=0, num_questions=self._num_questions)


class Listening(Constant):
    """Notes what it is asked, one by one and all at once."""

    def __init__(self):
        super().__init__(length=5.0)
        self.asked, self.batches = [], []

    def predict(self, request):
        self.asked.append(request)
        return super().predict(request)

    def predict_all(self, requests):
        self.batches.append([(each.sequence_id, each.current_length) for each in requests])
        return super().predict_all(requests)


class Late(Constant):
    """Answers at admission, and fails when it is asked again."""

    def predict_all(self, requests):
        raise RuntimeError("asked too often")


class Mute(Constant):
    def metrics(self):
        raise RuntimeError("I do not count")


@pytest.fixture
def registry():
    class Plugin:
        @hookimpl
        def sagellm_providers(self):
            return [
                Provider("lifetime_predictor", name.lower(), f"{__name__}:{name}", "of a test")
                for name in ("Constant", "Listening", "Late", "Mute")
            ]

    registry = PluginRegistry.load()
    registry.register(Plugin(), distribution="acme")
    resolve = registry.resolve
    own = {
        each.__name__.lower(): each for each in (Constant, Listening, Late, Mute)
    }  # this module has no importable name
    registry.resolve = lambda kind, name: own.get(name) or resolve(kind, name)
    return registry


def test_a_predictor_from_outside_is_scored_and_its_own_figures_stay(make_engine, registry):
    engine = make_engine(registry=registry, lifetime_predictor="constant{length=12}")
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    tokens = list(engine.generate([[5, 6, 7]], params)[0].outputs[0].token_ids)
    stop = tokens[9]
    engine.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=30, stop_token_ids=[stop]))
    length = tokens.index(stop) + 1
    metrics = engine.client.core.metrics().modules["lifetime_predictor"]
    assert metrics == OwnMetrics(
        num_predictions=2,
        num_updates=2,
        num_cut=1,
        num_scored=1,
        mae_tokens=12 - length,
        median_mae_tokens=0,
        within_10_percent=0,
        within_10_percent_or_5_tokens=float(12 - length <= 5),
        num_questions=4,  # and when the first output became longer than predicted, twice
    )


def test_a_request_comes_with_the_answers_to_its_prefixes_unless_they_were_cut(make_engine, registry):
    engine = make_engine(registry=registry, lifetime_predictor="listening", block_size=4)
    asked = engine.client.core.parts.predictor.asked
    prompt = list(range(5, 17))
    cut = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    tokens = list(engine.generate([prompt], cut)[0].outputs[0].token_ids)
    engine.generate([[*prompt, 3]], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    assert [each.answers for each in asked if not each.current_length] == [(), ()]
    stop = tokens[7]
    engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=20, stop_token_ids=[stop]))
    engine.generate([[*prompt[:8], 3, 3, 3, 3]], SamplingParams(max_tokens=1))
    (known,) = asked[-1].answers
    assert (known.num_tokens, known.lengths) == (8, (tokens.index(stop) + 1,))
    assert known.last_ns <= asked[-1].arrival_ns


def test_sequences_longer_than_predicted_are_asked_about_together(make_engine, registry):
    engine = make_engine(registry=registry, lifetime_predictor="listening")
    engine.generate([[5, 6, 7], [8, 9]], SamplingParams(max_tokens=30, ignore_eos=True))
    batches = engine.client.core.parts.predictor.batches
    assert [sorted(length for _, length in batch) for batch in batches[:2]] == [[6, 6], [14, 14]]
    assert len({name for name, _ in batches[0]}) == 2


def test_a_predictor_that_fails_when_asked_again_is_not_asked_any_more(make_engine, registry, caplog):
    engine = make_engine(registry=registry, lifetime_predictor="late{length=3}")
    (output,) = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=30, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 30
    assert caplog.text.count("the lifetime predictor failed") == 1


def test_metrics_that_fail_leave_the_engines_own_scores(make_engine, registry):
    engine = make_engine(registry=registry, lifetime_predictor="mute")
    engine.generate([[5, 6, 7]], SamplingParams(max_tokens=3, ignore_eos=True))
    metrics = engine.client.core.metrics().modules["lifetime_predictor"]
    assert metrics == LifetimeMetrics(num_predictions=1, num_updates=1, num_cut=1)


@pytest.mark.parametrize("length", ["long", math.nan, math.inf, -1.0, 1e300])
def test_a_prediction_that_cannot_be_ends_no_request(make_engine, registry, length):
    engine = make_engine(registry=registry, lifetime_predictor="constant")
    engine.client.core.parts.predictor._length = length
    (output,) = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=3, ignore_eos=True))
    assert output.outputs[0].finish_reason == "length"
    assert engine.client.core.metrics().modules["lifetime_predictor"].num_scored == 0


def test_a_trace_scores_the_configured_predictor():
    requests = [TraceRequest(0.1 * number, 50, 10 + number) for number in range(20)]
    config = EngineConfig().with_values({"kv.num_blocks": 100})
    run = simulate_serving(requests, config, COSTS)
    assert run.predictor is not None
    assert (run.predictor.num_predictions, run.predictor.num_cut) == (20, 1)  # the longest is the limit
    assert run.predictor.num_scored == 18  # the first prediction stands on nothing
