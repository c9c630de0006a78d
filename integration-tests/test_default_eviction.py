"""The default eviction policy beside LRU, in the cache that serves, on loads made to mislead it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sagellm.core import TraceRequest
from sagellm.engines import EngineConfig
from sagellm.lab.simulation.replay import CacheReplay

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from loads import LOADS, num_distinct_blocks

from sagellm.kvmgr.eviction.shadows import Duel

LEAST = -0.3
"""Points of tokens saved that it may be under LRU."""


def saved(requests: list[TraceRequest], policy: str, num_blocks: int) -> tuple[float, dict[str, float]]:
    """Replay and return the points saved, and what the policy says of itself."""
    values = {
        "kv.num_blocks": num_blocks,
        "kv.block_size": requests[0].block_tokens,
        "prefix_cache.eviction_policy": policy,
    }
    cache = CacheReplay(EngineConfig().with_values(values))
    num_saved = sum(one.num_saved_tokens for one in cache.run(requests))
    assert not cache.kv.cache.metrics().policy_failure
    points = 100 * num_saved / sum(one.num_prompt_tokens for one in requests)
    return points, dict(cache.kv.metrics_of["eviction_policy"]().details)


@pytest.mark.parametrize(
    "name",
    ["one shot", *(pytest.param(name, marks=pytest.mark.full) for name in ("agent sessions", "two tenants"))],
)
def test_the_default_is_never_far_under_lru(name):
    """Where the order alone that is learnt loses a point; with fewer prompts chance decides."""
    requests = LOADS[name](1, 1200)
    num_blocks = num_distinct_blocks(requests) // 4
    lru, _ = saved(requests, "lru", num_blocks)
    reuse, details = saved(requests, "reuse", num_blocks)
    assert reuse - lru >= LEAST
    if not details["num_switches"]:
        assert reuse == lru, "it is LRU until it is known to save more"


@pytest.mark.parametrize(("name", "gain"), [("nearly all", 5.0), ("one shot", 3.0)])
def test_the_default_saves_more_where_some_come_back_and_most_do_not(name, gain):
    requests = LOADS[name](1, 1200)
    num_blocks = num_distinct_blocks(requests) // 20
    assert saved(requests, "reuse", num_blocks)[0] - saved(requests, "lru", num_blocks)[0] > gain


def test_its_shadow_of_lru_saves_what_lru_saves():
    requests = LOADS["scans"](3, 800)
    num_blocks = num_distinct_blocks(requests) // 5
    lru, _ = saved(requests, "lru", num_blocks)
    _, details = saved(requests, "reuse", num_blocks)
    num_tokens = sum(one.num_prompt_tokens for one in requests)
    block_tokens = requests[0].block_tokens
    assert 100 * details["shadow_blocks_saved_lru"] * block_tokens / num_tokens == pytest.approx(lru, abs=0.1)


@pytest.mark.parametrize("name", ["one shot", "chat"])
def test_its_shadow_of_the_learnt_order_saves_what_the_cache_does_that_follows_it(name, monkeypatch):
    """Shared beginnings that come back with a prompt were once given up with it: 3 points of "one shot"."""
    monkeypatch.setattr(Duel, "is_won", property(lambda _: True, lambda *_: None), raising=False)
    requests = LOADS[name](3, 1000)
    num_blocks = num_distinct_blocks(requests) // 10
    reuse, details = saved(requests, "reuse", num_blocks)
    num_tokens = sum(one.num_prompt_tokens for one in requests)
    shadow = 100 * details["shadow_blocks_saved_reuse"] * requests[0].block_tokens / num_tokens
    assert reuse == pytest.approx(shadow, abs=0.6)


def test_it_says_by_which_order_each_block_was_evicted():
    requests = LOADS["nearly all"](2, 600)
    values = {
        "kv.num_blocks": num_distinct_blocks(requests) // 10,
        "kv.block_size": requests[0].block_tokens,
        "prefix_cache.eviction_policy": "reuse",
    }
    cache = CacheReplay(EngineConfig().with_values(values))
    assert len(list(cache.run(requests))) == 600
    details = cache.kv.metrics_of["eviction_policy"]().details
    told = [details["num_blocks_by_last_use"], details["num_blocks_by_learnt_order"]]
    assert min(told) > 0
    assert sum(told) == cache.kv.cache.metrics().num_evicted_blocks


def test_an_admission_makes_no_explanation_that_nobody_asked_for(monkeypatch):
    from sagellm.kvmgr.prefix_cache import radix

    asked = []

    def note(*arguments):
        asked.append(arguments)
        return made(*arguments)

    made = radix.explain
    monkeypatch.setattr(radix, "explain", note)
    requests = LOADS["chat"](7, 30)
    values = {"kv.num_blocks": 500, "kv.block_size": requests[0].block_tokens}
    cache = CacheReplay(EngineConfig().with_values(values))
    assert len(list(cache.run(requests))) == 30
    assert not asked
    assert cache.kv.manager.log.find(None).explain().cause == "never_seen"
    assert len(asked) == 1
