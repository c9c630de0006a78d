"""Replays of traces: against a plain model of LRU, against the bounds, and under bad input."""

from __future__ import annotations

from collections import OrderedDict
from random import Random

import pytest

from sagellm.core import (
    ConfigError,
    InvalidInputError,
    PluginError,
    PluginRegistry,
    ProviderSpec,
    TraceRequest,
    pack,
)
from sagellm.engines.config.schema import EngineConfig
from sagellm.engines.modules import Modules
from sagellm.lab.simulation.bounds import count_known_tokens, replay, replay_belady, replay_unlimited
from sagellm.lab.simulation.figures import figures_of, sharing_fractions
from sagellm.lab.simulation.replay import CacheReplay
from sagellm.lab.simulation.runs import simulate

SIZE = 4


def config(num_blocks: int, policy: str = "lru") -> EngineConfig:
    return EngineConfig().with_values(
        {
            "kv.num_blocks": num_blocks,
            "kv.block_size": SIZE,
            "prefix_cache.eviction_policy": policy,
            "prefix_cache.name": "radix{reuses_partial_blocks=false}",
        }
    )


def ignore(_: float) -> None:
    pass


def conversations(seed: int, num_requests: int = 300) -> list[TraceRequest]:
    """Conversations that grow by one to three blocks a turn, and sometimes take an earlier turn up again."""
    rng = Random(seed)
    open_paths: list[list[int]] = [[0]]
    made = []
    next_id = 1
    for index in range(num_requests):
        if rng.random() < 0.4:
            path = [0]
        else:
            path = rng.choice(open_paths[-12:])
            path = path[: rng.randint(1, len(path))] if rng.random() < 0.2 else path
        num_new = rng.randint(1, 3)
        path = [*path, *range(next_id, next_id + num_new)]
        next_id += num_new
        open_paths.append(path)
        made.append(TraceRequest(float(index), len(path) * SIZE, 1, tuple(path), SIZE))
    return made


def saved_by_plain_lru(requests: list[TraceRequest], num_blocks: int) -> list[int]:
    """Blocks as an ordered dict, a path's end older than its beginning; the last token is computed."""
    held: OrderedDict[int, None] = OrderedDict()
    saved = []
    for request in requests:
        path = request.block_ids
        reachable = path[: (request.num_prompt_tokens - 1) // SIZE]
        num_hits = next((i for i, block in enumerate(reachable) if block not in held), len(reachable))
        for block in path[:num_hits]:
            held.move_to_end(block)
        used = set(path[:num_hits])
        while len(held) - len(used) + len(path) > num_blocks:
            held.pop(next(block for block in held if block not in used))
        for block in reversed(path):
            held[block] = None
            held.move_to_end(block)
        saved.append(num_hits * SIZE)
    return saved


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_blocks", [40, 90])
def test_lru_saves_what_a_plain_model_saves(seed, num_blocks):
    requests = conversations(seed)
    replayed = replay(requests, config(num_blocks), ignore)
    assert [one.num_saved_tokens for one in replayed] == saved_by_plain_lru(requests, num_blocks)
    assert not any(one.is_refused for one in replayed)


@pytest.mark.parametrize("seed", range(2))
def test_no_policy_saves_more_than_belady_and_belady_no_more_than_a_cache_without_limit(seed):
    requests = conversations(seed)
    for num_blocks in (40, 60, 90, 150):
        bound, ideal = (
            sum(one.num_saved_tokens for one in run(requests, config(num_blocks), ignore))
            for run in (replay_belady, replay_unlimited)
        )
        for policy in ("lru", "fifo"):
            saved = sum(one.num_saved_tokens for one in replay(requests, config(num_blocks, policy), ignore))
            assert saved <= bound <= ideal


def test_belady_finds_the_best_of_all_choices():
    """Three prompts in a pool of two blocks: only who keeps what comes back saves anything."""
    requests = [
        TraceRequest(float(i), SIZE + 1, 1, token_ids=pack([name] * SIZE + [9]))
        for i, name in enumerate([1, 2, 3, 1, 4, 1])
    ]
    (saved, by_lru) = (
        [one.num_saved_tokens for one in run(requests, config(3), ignore)] for run in (replay_belady, replay)
    )
    assert saved == [0, 0, 0, SIZE, 0, SIZE]
    assert sum(by_lru) < sum(saved)


@pytest.mark.no_cover
def test_a_policy_that_learns_keeps_who_comes_back():
    """Questions that nobody goes on with, among conversations that each come back after two minutes."""
    rng = Random(5)
    requests: list[TraceRequest] = []
    next_id = 1
    for index in range(150):
        path: list[int] = [0]
        for turn_number in range(6):
            path = [*path, *range(next_id, next_id + 6)]
            next_id += 6
            when_s = 40.0 * index + turn_number * 120.0 * rng.lognormvariate(0, 0.3)
            requests.append(TraceRequest(when_s, len(path) * SIZE, 1, tuple(path), SIZE))
        for _ in range(6):
            once = (0, *range(next_id, next_id + 20))
            next_id += 20
            requests.append(TraceRequest(40.0 * (index + rng.random()), len(once) * SIZE, 1, once, SIZE))
    requests.sort(key=lambda one: one.arrival_s)
    found = simulate(
        requests, config(200), capacities=[200], policies=["reuse", "lru", "belady"], advance=ignore
    )
    saved = {run.eviction_policy: run.figures.token_saving for run in found.runs}
    assert saved["lru"] < saved["reuse"] < saved["belady"]
    assert (saved["reuse"] - saved["lru"]) / (saved["belady"] - saved["lru"]) > 0.45, saved


@pytest.mark.parametrize("seed", range(5))
def test_the_ideal_is_the_longest_beginning_that_an_earlier_prompt_has_too(seed):
    rng = Random(seed)
    prompts = [[rng.randrange(2) for _ in range(rng.randrange(1, 12))] for _ in range(60)]
    requests = [
        TraceRequest(float(i), len(ids), 1, token_ids=pack(ids), tenant=rng.choice("ab"))
        for i, ids in enumerate(prompts)
    ]
    for index, known in enumerate(count_known_tokens(requests)):
        tenant, ids = requests[index].tenant, prompts[index]
        earlier = [prompts[i] for i in range(index) if requests[i].tenant == tenant]
        assert known == max(
            n for n in range(len(ids)) if n == 0 or any(other[:n] == ids[:n] for other in earlier)
        )


@pytest.mark.parametrize("seed", range(5))
def test_a_cache_made_of_blocks_saves_no_more_than_the_ideal(seed):
    requests = conversations(seed)
    blocks = [one.num_saved_tokens for one in replay_unlimited(requests, config(1), ignore)]
    known = count_known_tokens(requests)
    assert all(saved <= ideal for saved, ideal in zip(blocks, known, strict=True))
    assert sum(known) - sum(blocks) < len(requests) * SIZE


def test_figures_are_those_of_a_hand_count():
    first = pack([1] * SIZE + [2] * SIZE + [3])
    second = pack([1] * SIZE + [2] * SIZE + [4, 4])
    requests = [TraceRequest(0.0, 9, 1, token_ids=first), TraceRequest(1.0, 10, 1, token_ids=second)]
    replayed = replay(requests, config(20), ignore)
    figures = figures_of(replayed, replayed, capacity=20, block_size=SIZE)
    assert (figures.num_blocks, figures.num_reused_blocks, figures.num_new_blocks) == (6, 2, 4)
    assert figures.token_saving == figures.token_hit_rate == pytest.approx(8 / 19)
    assert figures.block_sharing_fraction == pytest.approx(2 / 6)
    assert figures.mean_block_sharing_fraction == pytest.approx((0 + 2 / 3) / 2)
    assert figures.sharing_fraction_source == pytest.approx((6 - 2) / 6), "partial blocks count as reused"
    assert figures.mean_sharing_fraction_source == pytest.approx((1 / 3 + 1) / 2)
    assert figures.internal_fragmentation == pytest.approx(1 - 19 / 24)
    assert (figures.re_prefill_rate, figures.utilisation) == (0.0, 0.0)
    assert sharing_fractions(replayed) == [0.0, 2 / 3]


def test_what_was_evicted_and_came_again_is_computed_a_second_time():
    prompts = [pack([name] * SIZE * 2) for name in (1, 2, 1)]
    requests = [TraceRequest(float(i), SIZE * 2, 1, token_ids=ids) for i, ids in enumerate(prompts)]
    found = simulate(
        requests, config(2), capacities=[2, 9], policies=["lru", "belady", "off"], advance=ignore
    )
    small, bound, off, large, _, _ = (run.figures for run in found.runs)
    assert found.upper_bound == pytest.approx(SIZE / (6 * SIZE))
    assert (small.token_saving, small.re_prefill_rate) == (0.0, pytest.approx(1 / 6))
    assert small.utilisation == 1.0
    assert (large.token_saving, large.re_prefill_rate, large.utilisation) == (found.upper_bound, 0.0, 0.0)
    assert (off.num_reused_blocks, off.utilisation, bound.num_refused) == (0, 0.0, 0)


def test_a_prompt_that_never_fits_is_refused_and_costs_nothing():
    long, short = pack(range(40)), pack(range(100, 108))
    requests = [
        TraceRequest(float(i), len(ids), 1, token_ids=ids) for i, ids in enumerate((short, long, short))
    ]
    cache = CacheReplay(config(3))
    first, refused, again = cache.run(requests)
    assert (first.is_refused, refused.is_refused, again.is_refused) == (False, True, False)
    assert refused.num_new_blocks == 0
    cache.kv.manager.check_integrity()


def test_tenants_share_nothing():
    ids = pack(range(8))
    requests = [TraceRequest(float(i), 8, 1, token_ids=ids, tenant=tenant) for i, tenant in enumerate("abab")]
    for run in (replay, replay_belady, replay_unlimited):
        assert [one.num_saved_tokens for one in run(requests, config(50), ignore)] == [0, 0, SIZE, SIZE]


def test_what_cannot_be_replayed_is_said():
    with pytest.raises(InvalidInputError, match="neither token ids nor block ids"):
        replay([TraceRequest(0.0, 5, 1)], config(4), ignore)
    with pytest.raises(InvalidInputError, match="block ids are 3 … 2147483648"):
        replay([TraceRequest(0.0, 5, 1, (3, 2**31), SIZE)], config(4), ignore)
    with pytest.raises(ConfigError, match=r"kv\.num_blocks is null"):
        CacheReplay(EngineConfig())
    with pytest.raises(ConfigError, match="at least one block"):
        simulate([], config(4), capacities=[0], policies=["lru"], advance=ignore)
    with pytest.raises(ConfigError, match="needs to know the future"):
        CacheReplay(config(4, "belady"))


def test_a_policy_that_wants_a_lifetime_predictor_is_given_a_new_one_of_the_configured_kind():
    registry = PluginRegistry.load()
    for name in ("statistical", "null"):
        modules = Modules(registry, config(40, "predictive").with_values({"predictor.name": name}))
        policies = [modules.eviction_policy(modules.config.prefix_cache.eviction_policy) for _ in range(2)]
        kinds = {type(policy.lifetime_predictor) for policy in policies}
        assert kinds == {registry.resolve("lifetime_predictor", name)}
        assert policies[0].lifetime_predictor is not policies[1].lifetime_predictor
        with pytest.raises(ConfigError, match="'predictive' has no option 'depth'; it takes min_confidence"):
            modules.eviction_policy(ProviderSpec("predictive", {"depth": 3}))


def test_a_replay_teaches_the_predictor_of_its_policy():
    requests = conversations(1)
    cache = CacheReplay(config(60, "predictive"))
    for _ in cache.run(requests):
        pass
    policy = cache.kv.metrics_of["eviction_policy"]()
    assert policy.details["num_asked"] > 100


def test_options_are_those_of_the_configured_policy_alone():
    requests = [TraceRequest(float(i), SIZE * 2, 1, token_ids=pack([i % 3] * SIZE * 2)) for i in range(9)]
    settings = config(4, "qos").with_values({"prefix_cache.eviction_policy": "qos{weights={a: 2.0}}"})
    found = simulate(requests, settings, capacities=[4], policies=["qos", "lru", "belady"], advance=ignore)
    assert [run.eviction_policy for run in found.runs] == ["qos", "lru", "belady"]


def test_a_policy_that_fails_is_not_judged(monkeypatch):
    def fail(self, num_blocks):
        raise ValueError("no victim today")

    monkeypatch.setattr("sagellm.kvmgr.eviction.lru.LRUEvictionPolicy.victims", fail)
    requests = [TraceRequest(float(i), SIZE * 2, 1, token_ids=pack([i] * SIZE * 2)) for i in range(9)]
    with pytest.raises(PluginError, match="cannot be judged: LRUEvictionPolicy: ValueError: no victim today"):
        replay(requests, config(4), ignore)
