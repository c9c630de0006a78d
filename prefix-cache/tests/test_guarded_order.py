"""A policy that raises in the middle of a change of the tree."""

from __future__ import annotations

import logging
import random

import pytest

from sagellm.core import CachedNode
from sagellm.core.protocols.eviction import NullEvictionPolicy
from sagellm.core.testing import AuditError, AuditingEvictionPolicy
from sagellm.kvmgr.prefix_cache import RadixPrefixCache
from sagellm.kvmgr.prefix_cache.leaf_order import LeafLRU

CALLS = ["on_insert", "on_hit", "on_remove", "add_candidate", "remove_candidate", "victim"]


class Failing(NullEvictionPolicy):
    """Least recently used first, until the given call comes the given time."""

    def __init__(self, call: str, number: int, error: type[Exception] = RuntimeError) -> None:
        self._order, self._call, self._left, self._error = LeafLRU(), call, number, error

    def _pass_on(self, call: str, *nodes: CachedNode) -> CachedNode | None:
        self._left -= call == self._call
        if not self._left:
            raise self._error(call)
        return getattr(self._order, call)(*nodes)

    def on_insert(self, node: CachedNode) -> None:
        self._pass_on("on_insert", node)

    def on_hit(self, node: CachedNode) -> None:
        self._pass_on("on_hit", node)

    def on_remove(self, node: CachedNode) -> None:
        self._pass_on("on_remove", node)

    def add_candidate(self, node: CachedNode) -> None:
        self._pass_on("add_candidate", node)

    def remove_candidate(self, node: CachedNode) -> None:
        self._pass_on("remove_candidate", node)

    def victim(self) -> CachedNode | None:
        return self._pass_on("victim")


def churn(cache: RadixPrefixCache, rng: random.Random) -> list[list[int]]:
    """Use a cache at random and return every list of blocks that it gave."""
    given, locks, next_block = [], [], 0
    for _ in range(150):
        tokens = [rng.randrange(3) for _ in range(rng.randint(1, 8))]
        act = rng.random()
        if act < 0.4:
            block_ids = list(range(next_block, next_block + len(tokens)))
            next_block += len(block_ids)
            given.append(cache.insert_prefix(tokens, block_ids).block_ids)
        elif act < 0.65:
            locks.append(cache.lock(cache.match_prefix(tokens), num_lookup_tokens=len(tokens)))
        elif act < 0.85 and locks:
            cache.unlock(locks.pop())
        else:
            given.append(cache.evict(rng.randint(1, 9)))
        cache.check_integrity()
    return given


@pytest.mark.parametrize("number", [1, 2, 7, 20])
@pytest.mark.parametrize("call", CALLS)
def test_a_policy_that_fails_is_replaced_and_nothing_is_lost(caplog, call, number):
    for seed in range(5):
        cache = RadixPrefixCache(24, 1, eviction_policy=Failing(call, number))
        with caplog.at_level(logging.ERROR):
            given = churn(cache, random.Random(seed))
        assert given == churn(RadixPrefixCache(24, 1), random.Random(seed))
        assert f"RuntimeError: {call}" in caplog.text


def test_an_assertion_of_a_policy_is_its_own_failure():
    cache = RadixPrefixCache(24, 1, eviction_policy=Failing("on_insert", 1, AssertionError))
    assert cache.insert_prefix([1], [0]).block_ids == [0]
    cache.check_integrity()
    assert "AssertionError: on_insert" in cache.metrics().policy_failure
    assert cache.evict(1) == [0]


def test_an_audit_accuses_the_cache():
    cache = RadixPrefixCache(24, 1, eviction_policy=AuditingEvictionPolicy())
    cache.insert_prefix([1], [0])
    (leaf,) = cache._tree.nodes()
    with pytest.raises(AuditError, match=f"node {leaf.node_id} became a candidate twice"):
        cache._tree.leaves.add(leaf)
    assert not cache.metrics().policy_failure
