"""Policies of a running engine that are switched between two steps."""

from __future__ import annotations

import pytest

from sagellm.core import (
    ConfigError,
    InvalidInputError,
    LifetimePrediction,
    SageLLMError,
    UnknownNameError,
)
from sagellm.engines import SamplingParams
from sagellm.engines.engine_core.guards import LatestRequests, Limit
from sagellm.engines.engine_core.policies import PolicyAdmin
from sagellm.kvmgr.eviction import LRUEvictionPolicy
from sagellm.kvmgr.lifetime import StatisticalLifetimePredictor

POLICIES = {
    "eviction": ("s3fifo", "lru", "arc", "qos", "lfu", "slru", "reuse", "predictive", "cost", "fifo"),
    "passes": (
        "order=none",
        "share=none,order=priority",
        "chunk=none",
        "order=mlfq",
        "order=shortest,share=none",
    ),
    "predictor": ("null", "statistical"),
    "drafts": ("ngram", "suffix", "none"),
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def prompts(number, length=40):
    """Prompts that begin alike in groups, with repetitions for proposers to find."""
    return [[5 + index % 4] * 16 + [20 + index, 30, 40, 41] * ((length - 16) // 4) for index in range(number)]


def run_all(engine, between=lambda number: None):
    """Return the tokens of 24 requests, which arrive as others run."""
    waiting, tokens, step = prompts(24), {}, 0
    while waiting or engine.has_unfinished_requests():
        if waiting and not step % 2:
            engine.add_request(waiting.pop(0), GREEDY, request_id=str(24 - len(waiting)))
        for output in engine.step():
            if output.finished:
                tokens[output.request_id] = output.outputs[0].token_ids
        step += 1
        between(step)
    engine.client.core.kv.check_integrity()
    return tokens


@pytest.mark.parametrize("kind", [*POLICIES, "all"])
def test_outputs_are_those_without_a_switch(make_engine, kind):
    few = {"num_blocks": 40, "max_num_seqs": 6}
    expected = run_all(make_engine(**few))
    engine = make_engine(**few)
    admin = PolicyAdmin(engine.client.core)
    switched = {kind: POLICIES[kind]} if kind in POLICIES else POLICIES

    def switch(step):
        for name, texts in switched.items():
            admin.set(name, texts[step % len(texts)])

    assert run_all(engine, switch) == expected
    counts = admin.metrics().num_changes
    assert all(counts[name]["operator"] >= 20 for name in switched)
    assert len(expected) == 24


def test_a_policy_that_comes_later_evicts_what_was_used_longest_ago(make_engine):
    engine = make_engine(num_blocks=16)
    admin = PolicyAdmin(engine.client.core)
    one = SamplingParams(temperature=0.0, max_tokens=1)
    for first in (5, 6, 7):
        engine.generate([first] * 33, one)
    engine.generate([5] * 33, one)
    admin.set("eviction", "lru")
    kv = engine.client.core.kv
    kv.evict(5)  # three partial blocks first
    engine.generate([7] * 33, one)  # 6 went first
    assert kv.log.find(None).explain().match_length >= 32
    assert admin.policies()["policies"]["eviction"]["name"] == "lru"
    assert engine.metrics().modules["eviction_policy"].num_victims > 0


@pytest.mark.parametrize(
    ("kind", "name", "error"),
    [
        ("evicton", "lru", ConfigError),
        ("eviction", "lruu", UnknownNameError),
        ("eviction", "s3fifo{small=1}", ConfigError),
        ("eviction", "belady", SageLLMError),
        ("eviction", "", InvalidInputError),
        ("predictor", "mlfq", UnknownNameError),
        ("predictor", "ranker{weights=/no/such/file}", SageLLMError),
        ("passes", "order=unknown", UnknownNameError),
        ("passes", "a=b", ConfigError),
        ("drafts", "ngram{max_tokens=-1}", SageLLMError),
        ("drafts", 3, InvalidInputError),
    ],
)
def test_what_cannot_be_changes_nothing(make_engine, kind, name, error):
    engine = make_engine()
    admin = PolicyAdmin(engine.client.core)
    before = admin.policies()
    with pytest.raises(error):
        admin.set(kind, name)
    assert admin.policies() == before
    assert engine.generate([5, 6, 7], GREEDY)[0].outputs[0].token_ids


class Refusing(LRUEvictionPolicy):
    """Fails at what it is told first."""

    def on_insert(self, node):
        raise ZeroDivisionError("told of a node")


def test_a_policy_that_fails_when_it_takes_over_leaves_the_old_one(make_engine, monkeypatch):
    engine = make_engine()
    admin = PolicyAdmin(engine.client.core)
    engine.generate([5] * 40, GREEDY)
    old = engine.client.core.kv.policy
    monkeypatch.setattr("sagellm.kvmgr.eviction.lru.LRUEvictionPolicy", Refusing)
    with pytest.raises(SageLLMError, match="told of a node"):
        admin.set("eviction", "lru")
    assert engine.client.core.kv.policy is old
    assert engine.client.core.kv.cache.metrics().policy_failure == ""
    engine.client.core.kv.check_integrity()


def test_a_predictor_that_cannot_predict_what_is_live_is_not_taken(make_engine, monkeypatch):
    engine = make_engine(lifetime_predictor="null")
    admin = PolicyAdmin(engine.client.core)
    engine.add_request([5, 6, 7], GREEDY)
    engine.step()
    wrong = LifetimePrediction(remaining_length=-1, estimated_time=0.0, confidence=0.5)
    monkeypatch.setattr(StatisticalLifetimePredictor, "predict_all", lambda _, asked: [wrong] * len(asked))
    with pytest.raises(SageLLMError, match="not possible"):
        admin.set("predictor", "statistical")
    assert admin.policies()["policies"]["predictor"]["name"] == "null"


def test_a_predictor_is_asked_about_what_waits_and_runs(make_engine):
    engine = make_engine(max_num_seqs=1, lifetime_predictor="null")
    admin = PolicyAdmin(engine.client.core)
    for _ in range(3):
        engine.generate([5, 6, 7], GREEDY)
    for _ in range(2):
        engine.add_request([5, 6, 7], GREEDY)
    engine.step()
    core = engine.client.core
    before = [each.predicted_tokens for each in core.live_sequences()]
    assert len(before) == 2
    admin.set("predictor", "statistical")
    scores = engine.metrics().modules["lifetime_predictor"]
    assert scores.num_predictions == 2
    waiting = core.scheduler.waiting_rows().predicted_remaining_tokens
    assert len(waiting) == 1


def test_what_a_limit_says():
    window = LatestRequests().window(0, [], 0)
    limit = Limit.read(" ttft_p99_s <= 0.5 ", window)
    assert (limit.text, limit.metric, limit.value) == ("ttft_p99_s<=0.5", "ttft_p99_s", 0.5)
    for wrong in ("ttft", "ttft_p99_s<0.5", "ttft_p99_s>=1", "hit<=1", "hit_rate<=1", "hit_rate>=1.2.3", ""):
        with pytest.raises(ConfigError):
            Limit.read(wrong, window)
    with pytest.raises(ConfigError, match="relative"):
        Limit.read("hit_rate>=-2%", window)


def test_a_guard_goes_back_when_its_limit_is_broken(make_engine):
    engine = make_engine()
    core = engine.client.core
    admin = PolicyAdmin(core)
    admin.set("eviction", "lru", guards=["latency_mean_s<=1000", "hit_rate>=0.9"], min_requests=3)
    shown = admin.policies()["policies"]["eviction"]["guard"]
    assert (shown["back_to"], [each["metric"] for each in shown["limits"]]) == (
        "reuse",
        ["latency_mean_s", "hit_rate"],
    )
    for first in range(10):
        engine.generate([10 + first, 6, 7], GREEDY)
        admin._checked_ns = 0
        core.watchers.stepped(core.parts.runtime.clock.now_ns())
    change = admin.policies()["changes"][-1]
    assert (change["made_by"], change["before"], change["after"]) == ("guard", "lru", "reuse")
    assert "hit_rate was 0, >= 0.9 was wanted, over 3 requests" in change["why"]
    assert admin.metrics().num_changes["eviction"] == {"operator": 1, "guard": 1}
    assert admin.policies()["policies"]["eviction"]["guard"] is None


def test_a_guard_sees_requests_that_still_wait(make_engine, hold):
    engine = make_engine(max_num_seqs=1)
    core = engine.client.core
    admin = PolicyAdmin(core)
    admin.set("passes", "order=priority", guards=["ttft_p99_s<=0.05"], min_requests=2)
    for _ in range(3):
        engine.add_request([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True))
    engine.step()
    now_ns = core.parts.runtime.clock.now_ns()
    admin.stepped(now_ns + 10**9)
    change = admin.policies()["changes"][-1]
    assert (change["made_by"], change["after"].split(",")[0]) == ("guard", "order=shortest")


def test_a_relative_guard_compares_with_before(make_engine):
    engine = make_engine()
    admin = PolicyAdmin(engine.client.core)
    for _ in range(4):
        engine.generate([5] * 40, GREEDY)
    found = admin.set("eviction", "lru", guards=["hit_rate>=-50%"])
    (limit,) = found["policies"]["eviction"]["guard"]["limits"]
    assert limit["value"] == pytest.approx(0.5 * 3 * 39 / 160, rel=0.05)


def test_the_explanation_has_the_switches_of_a_request(make_engine):
    from sagellm.engines.engine_core.explanation import Explainer

    engine = make_engine()
    admin = PolicyAdmin(engine.client.core)
    engine.add_request([5, 6, 7], GREEDY, request_id="asked")
    engine.step()
    admin.set("eviction", "lru")
    while engine.has_unfinished_requests():
        engine.step()
    admin.set("eviction", "fifo")
    (change,) = Explainer(engine.client.core, admin.changes_between).explain("asked").changes
    assert (change.kind, change.before, change.after) == ("eviction", "reuse", "lru")
    assert change.at_ns > 0


def test_a_cache_that_cannot_change_its_policy_says_so(make_engine):
    admin = PolicyAdmin(make_engine(enable_prefix_caching=False).client.core)
    with pytest.raises(ConfigError, match="prefix caching is off"):
        admin.set("eviction", "lru")
