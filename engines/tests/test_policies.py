"""Policies of a running engine that are switched between two steps."""

from __future__ import annotations

import pytest

from sagellm.core import (
    ConfigError,
    EngineError,
    InvalidInputError,
    LifetimePrediction,
    SageLLMError,
    UnknownNameError,
)
from sagellm.engines import SamplingParams
from sagellm.engines.engine_core.guards import Ended, Guard, LatestRequests, Limit
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


def ended(*, arrival=0.0, finished=1.0, scheduled=0.1, first=0.2, prompt=100, cached=0, failed=False):
    """A request that ended; times in seconds."""

    def ns(seconds):
        return None if seconds is None else round(seconds * 1e9)

    return Ended(ns(finished), ns(arrival), ns(scheduled), ns(first), prompt, cached, 10, 0, failed)


def latest(*requests):
    found = LatestRequests()
    found._ended.extend(requests)
    return found


def test_what_a_limit_says():
    window = LatestRequests().window(0, [], 0)
    limit = Limit.read(" ttft_p99_s <= 0.5 ", window, 1)
    assert (limit.text, limit.metric, limit.value) == ("ttft_p99_s<=0.5", "ttft_p99_s", 0.5)
    for wrong in ("ttft", "ttft_p99_s<0.5", "ttft_p99_s>=1", "hit<=1", "hit_rate<=1", "hit_rate>=1.2.3", ""):
        with pytest.raises(ConfigError):
            Limit.read(wrong, window, 1)
    for wrong, told in (
        ("hit_rate>=-0.05", "a sign without %; write hit_rate>=-5%"),
        ("error_rate<=1%", "% without a sign; write error_rate<=\\+5%"),
        ("hit_rate>=-2%", "needs 1 requests, and 0 are known"),
    ):
        with pytest.raises(ConfigError, match=told):
            Limit.read(wrong, window, 1)


def test_a_limit_relative_to_nothing_is_refused():
    window = latest(ended(), ended(), ended()).window(0, [], 2 * 10**9)
    with pytest.raises(ConfigError, match="needs 4 requests, and 3 are known"):
        Limit.read("latency_mean_s<=+5%", window, 4)
    with pytest.raises(ConfigError, match="hit_rate is 0 now"):
        Limit.read("hit_rate>=-5%", window, 3)
    assert Limit.read("latency_mean_s<=+5%", window, 3).value == pytest.approx(1.05)


def breach(text, requests, *, since=0.0, now=10.0, min_requests=1):
    empty = LatestRequests().window(0, [], 0)
    limits = (Limit.read(text, empty, 1),)
    guard = Guard(limits=limits, window_s=30, min_requests=min_requests, since_ns=round(since * 1e9))
    return guard.breach(latest(*requests), [], round(now * 1e9))


def test_a_request_that_failed_has_waited_until_it_failed():
    failed = ended(finished=0.2, scheduled=None, first=None, failed=True)
    assert breach("ttft_p99_s<=2", [failed]) is None
    assert "0.2 over 1 requests; the limit is <= 0.1" in breach("ttft_p99_s<=0.1", [failed])


def test_each_limit_needs_requests_of_its_own():
    requests = [ended(cached=0), *(ended(cached=0, scheduled=None, failed=True) for _ in range(20))]
    assert breach("hit_rate>=0.5", requests, min_requests=20) is None
    assert "error_rate was 0.95" in breach("error_rate<=0.5", requests, min_requests=20)


def test_a_hit_rate_is_of_requests_that_were_admitted_since_the_switch():
    before, after = ended(scheduled=1.0, finished=6.0), ended(scheduled=5.5, finished=6.0, cached=50)
    assert breach("hit_rate>=0.4", [before, after], since=5.0) is None
    assert "hit_rate was 0.25 over 2" in breach("hit_rate>=0.4", [before, after], since=0.5)


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
    assert change["why"] == "hit_rate was 0 over 3 requests; the limit is >= 0.9"
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
    found = admin.set("eviction", "lru", guards=["hit_rate>=-50%"], min_requests=4)
    (limit,) = found["policies"]["eviction"]["guard"]["limits"]
    assert limit["value"] == pytest.approx(0.5 * 3 * 39 / 160, rel=0.05)


def test_a_guard_that_fails_is_gone_and_another_watcher_stays(make_engine, monkeypatch, caplog):
    engine = make_engine()
    core = engine.client.core
    admin = PolicyAdmin(core)
    admin.set("eviction", "lru", guards=["latency_mean_s<=1000"])
    monkeypatch.setattr(Guard, "breach", lambda *_: 1 / 0)
    admin.stepped(core.parts.runtime.clock.now_ns())
    assert admin.policies()["policies"]["eviction"]["guard"] is None
    assert "the guard of eviction failed and is gone" in caplog.text
    engine.generate([5, 6, 7], GREEDY)
    admin.set("eviction", "fifo", guards=["latency_mean_s<=1000"])
    assert admin.policies()["policies"]["eviction"]["guard"] is not None


@pytest.mark.parametrize(
    "answers", [lambda asked: asked[1:], lambda asked: [], lambda asked: asked + asked[:1]]
)
def test_a_predictor_that_answers_too_few_or_too_many_does_not_take_over(make_engine, monkeypatch, answers):
    engine = make_engine(lifetime_predictor="null")
    admin = PolicyAdmin(engine.client.core)
    for _ in range(3):
        engine.add_request([5, 6, 7], GREEDY)
    engine.step()
    before = engine.client.core._predictions._predictor
    predict_all = StatisticalLifetimePredictor.predict_all
    monkeypatch.setattr(
        StatisticalLifetimePredictor, "predict_all", lambda self, asked: answers(predict_all(self, asked))
    )
    with pytest.raises(EngineError, match="answers 3 requests with"):
        admin.set("predictor", "statistical")
    assert engine.client.core._predictions._predictor is before


def test_passes_that_are_in_force_already_stay_with_their_guard(make_engine):
    admin = PolicyAdmin(make_engine().client.core)
    admin.set("passes", "order=priority", guards=["ttft_p99_s<=5"])
    assert admin.set("passes", "order=priority")["set"] == {
        "kind": "passes", "is_new": False, "ended_guard": None,
    }  # fmt: skip
    found = admin.set("passes", "order=priority", guards=["ttft_p99_s<=4"])["policies"]["passes"]
    assert found["guard"]["back_to"].startswith("order=shortest")
    assert len(admin.policies()["changes"]) == 1


def test_a_guarded_policy_that_fails_goes_back(make_engine, monkeypatch):
    engine = make_engine(num_blocks=8)
    core = engine.client.core
    admin = PolicyAdmin(core)
    monkeypatch.setattr(LRUEvictionPolicy, "victims", lambda *_: 1 / 0)
    admin.set("eviction", "lru", guards=["ttft_p99_s<=1000"])
    for first in range(6):
        engine.generate([10 + first] * 20, GREEDY)
    admin.stepped(core.parts.runtime.clock.now_ns() + 10**9)
    change = admin.policies()["changes"][-1]
    assert (change["made_by"], change["after"]) == ("guard", "reuse")
    assert "it failed: LRUEvictionPolicy: ZeroDivisionError" in change["why"]
    assert not admin.policies()["policies"]["eviction"]["failure"]


def test_a_policy_without_metrics_leaves_those_of_the_others(make_engine, monkeypatch, caplog):
    engine = make_engine()
    admin = PolicyAdmin(engine.client.core)
    monkeypatch.setattr(LRUEvictionPolicy, "metrics", lambda _: 1 / 0)
    admin.set("eviction", "lru")
    for _ in range(2):
        modules = engine.metrics().modules
    assert modules["policies"].policies["eviction"] == "lru"
    assert "eviction_policy" not in modules
    assert "metrics of eviction_policy failed, 1 times so far: " in caplog.text


def test_a_policy_that_failed_is_shown_and_can_be_set_again(make_engine, monkeypatch):
    engine = make_engine(num_blocks=8)
    admin = PolicyAdmin(engine.client.core)
    with monkeypatch.context() as broken:
        broken.setattr(LRUEvictionPolicy, "victims", lambda *_: 1 / 0)
        admin.set("eviction", "lru")
        for first in range(6):
            engine.generate([10 + first] * 20, GREEDY)
    assert "ZeroDivisionError" in admin.policies()["policies"]["eviction"]["failure"]
    found = admin.set("eviction", "lru")
    assert found["set"]["is_new"]
    assert not found["policies"]["eviction"]["failure"]


@pytest.mark.parametrize("number", [0, 9000, 1.5, float("nan"), True])
def test_a_guard_asks_for_as_many_requests_as_can_be_known(make_engine, number):
    with pytest.raises(ConfigError, match="min_requests is"):
        PolicyAdmin(make_engine().client.core).set(
            "eviction", "lru", guards=["hit_rate>=0.1"], min_requests=number
        )


def test_since_when_a_policy_is_in_force_outlives_the_list_of_changes(make_engine):
    admin = PolicyAdmin(make_engine().client.core)
    admin.set("predictor", "null")
    for number in range(101):
        admin.set("eviction", ("lru", "fifo")[number % 2])
    found = admin.policies()
    assert "predictor" not in {each["kind"] for each in found["changes"]}
    assert found["policies"]["predictor"]["for_s"] is not None


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
