"""Shadow caches say what a replay of the same requests with their policy says."""

from __future__ import annotations

from random import Random

import pytest

from sagellm.core import (
    ConfigError,
    Namespace,
    PluginRegistry,
    ProviderSpec,
    TraceRequest,
    VirtualClock,
    pack,
)
from sagellm.engines import SamplingParams
from sagellm.engines.config import EngineConfig
from sagellm.engines.engine_core.kv_modules import build_kv
from sagellm.engines.engine_core.policies import PolicyAdmin
from sagellm.engines.engine_core.seats import Seats
from sagellm.engines.engine_core.shadows import BlockSampler, Served, ShadowCaches
from sagellm.engines.modules import Modules
from sagellm.lab.simulation.prompts import kept_tokens
from sagellm.lab.simulation.replay import CacheReplay

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def conversations(number, *, seed=0, tenants=1, turns=0.8):
    """Turns of some conversations, which begin alike."""
    rng, system = Random(seed), list(range(2, 30))
    live, requests = [list(system) for _ in range(24)], []
    for index in range(number):
        one = rng.randrange(len(live))
        if rng.random() > turns:
            live[one] = list(system)
        live[one] += [rng.randrange(2, 500) for _ in range(rng.randint(1, 30))]
        answer = [rng.randrange(2, 500) for _ in range(rng.randint(1, 20))]
        requests.append(
            TraceRequest(
                0.1 * index,
                len(live[one]),
                len(answer),
                token_ids=pack(live[one]),
                output_token_ids=pack(answer),
                tenant=f"tenant-{one % tenants}",
            )
        )
        live[one] += answer
    return requests


def served(request, num_cached=0):
    return Served(
        kept_tokens(request),
        request.num_prompt_tokens,
        num_cached,
        Namespace(tenant=request.tenant),
        0,
        round(request.arrival_s * 1e9),
    )


def make_shadows(config, policies, **settings):
    modules = Modules(PluginRegistry.load(), config)
    seats = Seats(1, block_size=config.kv.block_size)
    kv = build_kv(modules, seats, config.kv.num_blocks, VirtualClock()).manager
    return ShadowCaches(modules, [*map(ProviderSpec.of, policies)], kv, **settings)


@pytest.mark.parametrize(
    "policy", ["lru", "s3fifo", "arc", "reuse", "predictive", "qos{within=reuse}", "lfu", "fifo"]
)
@pytest.mark.parametrize(
    "prefix_cache", ["radix", "radix{tenant_quotas={tenant-0: 20}}", "radix{reuses_partial_blocks=false}"]
)
def test_a_shadow_saves_what_a_replay_saves(policy, prefix_cache):
    requests = conversations(200, tenants=3)
    config = EngineConfig.from_flat(
        num_blocks=90,
        block_size=8,
        eviction_policy=policy,
        prefix_cache=prefix_cache,
        prefix_cache_max_blocks=80,
    )
    shadows = make_shadows(config, [policy])
    for number, done in enumerate(CacheReplay(config).run(requests)):
        before = shadows.total()
        shadows.take(served(requests[number]))
        (rate,) = shadows.rates(before, shadows.total())
        assert round(rate.value * done.num_prompt_tokens) == done.num_saved_tokens
    shadows.check_integrity()
    assert shadows.metrics().shadows[0].hit_rate > 0.2


def test_a_prompt_without_room_saves_nothing():
    shadows = make_shadows(EngineConfig.from_flat(num_blocks=8, block_size=8), ["lru"])
    long = TraceRequest(0.0, 100, 1, token_ids=pack(range(2, 102)), tenant="a")
    for _ in range(2):
        shadows.take(served(long))
        shadows.check_integrity()
    assert shadows.metrics().shadows[0].hit_rate == 0.0


def test_an_engine_feeds_its_shadows_in_order_of_arrival(make_engine):
    engine = make_engine(
        num_blocks=24, block_size=8, shadow="lru,s3fifo", max_num_seqs=3, lifetime_predictor="null"
    )
    shadows, requests = engine.client.core.shadows, conversations(60)
    asked = [[token % 60 + 2 for token in one.token_ids.tolist()[:70]] for one in requests]
    outputs, waiting = {}, list(enumerate(asked))
    while waiting or engine.has_unfinished_requests():
        if waiting:
            number, prompt = waiting.pop(0)
            lengths = SamplingParams(temperature=0.0, max_tokens=1 + number % 9, ignore_eos=True)
            engine.add_request(prompt, lengths, request_id=str(number))
        for each in engine.step():
            if each.finished:
                outputs[int(each.request_id)] = each.outputs[0].token_ids
    core = engine.client.core
    for _ in range(60):
        core.use_idle_time()
    found = core.metrics().modules["shadows"]
    assert (found.num_requests, found.num_waiting, len(shadows._by_id)) == (60, 0, 0)
    for each in found.shadows:
        config = EngineConfig.from_flat(num_blocks=24, block_size=8, eviction_policy=each.policy)
        trace = [
            TraceRequest(
                float(number), len(prompt), len(outputs[number]), token_ids=pack(prompt),
                output_token_ids=pack(outputs[number]), tenant="default",
            )
            for number, prompt in enumerate(asked)
        ]  # fmt: skip
        saved = sum(one.num_saved_tokens for one in CacheReplay(config).run(trace))
        assert each.num_hit_tokens == saved


def test_shadows_begin_with_what_is_cached(make_engine):
    engine = make_engine(num_blocks=64)
    engine.generate([5] * 40, GREEDY)
    admin = PolicyAdmin(engine.client.core)
    admin.shadow("lru,fifo")
    engine.generate([5] * 40, GREEDY)
    found = admin.policies()["shadows"]
    assert [each["num_hit_tokens"] for each in found["shadows"]] == [32, 32]  # whole blocks
    assert found["num_query_tokens"] == 40
    admin.shadow("off")
    assert admin.policies()["shadows"] is None
    assert "shadows" not in engine.metrics().modules


def test_a_switch_takes_over_what_a_shadow_of_all_blocks_has_learnt(make_engine):
    engine = make_engine(num_blocks=24, block_size=8, max_model_len=256, eviction_policy="lru")
    core = engine.client.core
    admin = PolicyAdmin(core)

    def switch(name):
        found = admin.set("eviction", name)
        return found["changes"][-1]["has_learnt"], core.kv.policy.metrics().details

    assert switch("reuse")[0] is False
    switch("lru")
    admin.shadow("reuse,arc,lru")
    for one in conversations(80):
        engine.generate([token % 60 + 2 for token in one.token_ids.tolist()[:150]], GREEDY)
    while core.use_idle_time():
        pass
    shadow = core.shadows.learnt("reuse").metrics().details
    assert shadow["num_turns"] > 60
    has_learnt, details = switch("reuse")
    assert has_learnt
    assert details["num_turns"] >= shadow["num_turns"], "what is cached comes on top"
    assert details["is_learnt_order_used"] == shadow["is_learnt_order_used"]
    engine.generate([7] * 50, GREEDY)
    assert admin.policies()["shadows"]["num_recent"] == 1, "the latest figures begin with the switch"
    assert switch("arc")[0] is True
    assert switch("lru")[0] is False, "it learns nothing"
    assert switch("reuse{window=100}")[0] is False, "another one runs as a shadow"
    core.shadows.check_integrity()


def test_what_is_cached_is_taken_in_a_few_leaves_at_a_time(make_engine):
    engine = make_engine(num_blocks=64)
    for first in range(20):
        engine.generate([5] * 10 + [100 + first] * 8, GREEDY)
    core = engine.client.core
    admin = PolicyAdmin(core)
    admin.shadow("lru")
    ((shadow,),) = core.shadows._shadows
    assert shadow.cache.metrics().num_blocks == 0
    engine.add_request([5] * 10 + [100] * 8, GREEDY)
    while engine.has_unfinished_requests():
        engine.step()
    while core.use_idle_time():
        pass
    core.shadows.check_integrity()
    assert not core.shadows._ends
    (found,) = admin.policies()["shadows"]["shadows"]
    assert found["num_hit_tokens"] == 16  # whole blocks, as it was taken in after them


def test_shadows_that_fail_are_gone(make_engine, monkeypatch):
    engine = make_engine(num_blocks=64, shadow="lru")
    core = engine.client.core
    monkeypatch.setattr(core.shadows, "stepped", lambda _: 1 / 0)
    engine.generate([5] * 40, GREEDY)
    assert core.shadows is None
    assert "shadows" not in core.metrics().modules


@pytest.mark.parametrize("num_blocks", [700, 1000, 2900])
def test_the_sample_that_is_advised_is_large_enough(num_blocks):
    with pytest.raises(ConfigError, match=r"sample [0-9.]+ or more") as raised:
        BlockSampler(16, 0.05, num_blocks)
    advised = float(str(raised.value).split("sample ")[-1].split(" or")[0])
    assert BlockSampler(16, advised, num_blocks).num_blocks(num_blocks) >= 256


def test_what_shadows_cannot_be_is_refused(make_engine):
    engine = make_engine(num_blocks=64)
    admin = PolicyAdmin(engine.client.core)
    admin.shadow("lru")
    before = engine.client.core.shadows
    for names, sample, told in (
        ("", 1.0, "no shadow is named"),
        ("lruu", 1.0, "lruu"),
        ("lru,lru", 1.0, "once"),
        ("s3fifo{size=3}", 1.0, "size"),
        ("lru", 0.5, "needs 256: do not sample"),
        ("lru", 0.0, "shadow_sample"),
        ("lru", 0.9, "at most 0.8, or 1"),
        (",".join(["lru"] * 17), 1.0, "at most 16"),
    ):
        with pytest.raises((ConfigError, LookupError), match=told):
            admin.shadow(names, sample=sample)
    assert engine.client.core.shadows is before


def test_an_aborted_request_counts_as_far_as_it_came(make_engine):
    engine = make_engine(num_blocks=64, shadow="lru", max_num_seqs=1)
    engine.add_request([5] * 40, GREEDY, request_id="runs")
    engine.add_request([6] * 40, GREEDY, request_id="waits")
    engine.step()
    engine.abort_request("waits")
    engine.abort_request("runs")
    core = engine.client.core
    core.use_idle_time()
    assert core.metrics().modules["shadows"].num_requests == 1  # the other was never admitted


@pytest.mark.parametrize("policy", ["lru", pytest.param("s3fifo", marks=pytest.mark.full)])
def test_a_sample_estimates_with_an_interval(policy):
    requests = conversations(3000, turns=0.95)
    config = EngineConfig.from_flat(num_blocks=1200, block_size=4)
    whole, part = make_shadows(config, ["lru", policy] if policy != "lru" else ["lru"]), None
    part = make_shadows(config, [policy], sample=0.5)
    for one in requests:
        before = whole.total()
        whole.take(served(one))
        own = int((whole.total().differences - before.differences)[0, 0])
        part.take(served(one, own))
    part.check_integrity()
    true, found = whole.metrics().shadows[-1].hit_rate, part.metrics().shadows[0]
    assert found.low < true < found.high
    assert abs(found.hit_rate - true) < 0.03
    assert part.metrics().sample == 0.5
