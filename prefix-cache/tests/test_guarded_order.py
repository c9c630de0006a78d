"""A policy that raises in the middle of a change of the tree."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from typing import Any

import pytest

from sagellm.core import AuditError, CachedNode, NodeId, VirtualClock
from sagellm.core.protocols.eviction import NullEvictionPolicy
from sagellm.kvmgr.prefix_cache import RadixPrefixCache
from sagellm.kvmgr.prefix_cache.leaf_order import LeafLRU
from sagellm.testing import AuditingEvictionPolicy

CALLS = ["on_insert", "on_hit", "on_resize", "on_remove", "add_candidate", "remove_candidate", "victim"]


class Failing(NullEvictionPolicy):
    """Least recently used first, until the given call comes the given time."""

    def __init__(self, call: str, number: int, error: type[Exception] = RuntimeError) -> None:
        self._order, self._call, self._left, self._error = LeafLRU(), call, number, error

    def _pass_on(self, call: str, *nodes: Any) -> CachedNode | None:
        self._left -= call == self._call
        if not self._left:
            raise self._error(call)
        return getattr(self._order, call)(*nodes)

    def on_insert(self, node: CachedNode) -> None:
        self._pass_on("on_insert", node)

    def on_hit(self, node: CachedNode) -> None:
        self._pass_on("on_hit", node)

    def on_resize(self, node: CachedNode, num_more: int) -> None:
        self._pass_on("on_resize", node, num_more)

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


@pytest.mark.parametrize(
    ("call", "number"),
    [(call, number) for call in CALLS for number in (1, 2, 7, 20) if (call, number) != ("on_resize", 20)],
)
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


class TakesAtOnce(NullEvictionPolicy):
    """Yields two of its leaves, then what it is told to: an exception, or a node."""

    def __init__(self, then: Exception | CachedNode) -> None:
        self.leaves: dict[int, CachedNode] = {}
        self._then = then

    def add_candidate(self, node: CachedNode) -> None:
        self.leaves[node.node_id] = node

    def victims(self, num_blocks: int) -> Iterator[CachedNode]:
        for node in list(self.leaves.values())[:2]:
            yield self.leaves.pop(node.node_id)
        if isinstance(self._then, Exception):
            raise self._then
        yield self._then


@pytest.mark.parametrize(
    ("then", "message"),
    [
        (RuntimeError("no more"), "RuntimeError: no more"),
        (CachedNode(node_id=NodeId(77), num_blocks=1, depth=1, created_ns=0, last_access_ns=0), "node 77"),
    ],
)
def test_a_policy_that_fails_while_it_yields_victims_is_replaced_and_nothing_is_lost(then, message):
    cache = RadixPrefixCache(24, 1, eviction_policy=TakesAtOnce(then))
    for number in range(6):
        cache.insert_prefix([number], [number])
    assert cache.evict(4) == [0, 1, 2, 3]
    assert message in cache.metrics().policy_failure
    cache.check_integrity()
    assert cache.evict(9) == [4, 5]


def test_a_parent_that_becomes_a_leaf_is_the_next_victim_of_the_same_call():
    cache = RadixPrefixCache(24, 1, clock=VirtualClock())
    cache.insert_prefix([1], [0])
    match = cache.lock(cache.match_prefix([1]))
    cache.insert_prefix([1, 2], [0, 1])
    cache.unlock(match)
    cache.insert_prefix([7], [2])
    assert cache.evict(2) == [1, 0]
    cache.check_integrity()


class CountsBlocks(NullEvictionPolicy):
    """Adds up what it is told of sizes."""

    num_blocks = 0

    def on_insert(self, node: CachedNode) -> None:
        self.num_blocks += node.num_blocks

    def on_split(self, upper: CachedNode, lower: CachedNode) -> None:
        pass

    def on_resize(self, node: CachedNode, num_more: int) -> None:
        self.num_blocks += num_more

    def on_remove(self, node: CachedNode) -> None:
        self.num_blocks -= node.num_blocks


class CountsAndEvicts(CountsBlocks):
    """Names leaves by their last use as well."""

    def __init__(self) -> None:
        self._order = LeafLRU()
        self.add_candidate, self.remove_candidate = self._order.add_candidate, self._order.remove_candidate
        self.victim = self._order.victim


def test_a_policy_is_told_of_every_block_that_comes_and_goes():
    for seed in range(20):
        policy = CountsAndEvicts()
        cache = RadixPrefixCache(24, 1, eviction_policy=policy, reuses_partial_blocks=False)
        churn(cache, random.Random(seed))
        cache.evict(3)
        assert policy.num_blocks == cache.metrics().num_blocks > 0
        assert not cache.metrics().policy_failure
