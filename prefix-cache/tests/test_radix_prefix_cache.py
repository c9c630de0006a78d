from __future__ import annotations

import sys

import pytest

from sagellm.core import (
    BlockError,
    ConfigError,
    InvalidInputError,
    Namespace,
    PrefixMatch,
    Randomness,
    StaleMatchError,
    VirtualClock,
    pack,
)
from sagellm.kvmgr.prefix_cache import CrossRequestKVCache, PrefixNode, RadixPrefixCache
from sagellm.testing import AuditingEvictionPolicy, KeepingPrefixCacheContract


class TestRadixPrefixCache(KeepingPrefixCacheContract):
    def make(self, max_blocks=100, block_size=4, *, eviction_policy=None, clock=None):
        return RadixPrefixCache(max_blocks, block_size, eviction_policy=eviction_policy, clock=clock)


@pytest.fixture
def cache():
    return RadixPrefixCache(100, 4, clock=VirtualClock())


def insert(cache, tokens, first_block, namespace=Namespace()):  # noqa: B008
    num_blocks = len(tokens) // cache.block_size
    return cache.insert_prefix(tokens, list(range(first_block, first_block + num_blocks)), namespace)


@pytest.mark.parametrize("sizes", [{"max_blocks": 0}, {"block_size": 0}, {"block_size": -16}])
def test_sizes_below_one_are_refused(sizes):
    (name,) = sizes
    with pytest.raises(ConfigError, match=f"{name} is"):
        RadixPrefixCache(**sizes)


def test_one_insertion_is_one_node_and_a_fork_makes_three(cache):
    insert(cache, range(16), 0)
    assert cache.metrics().num_nodes == 1
    insert(cache, [*range(8), 90, 91, 92, 93], 10)
    assert cache.metrics().num_nodes == 3
    assert cache.match_prefix(range(16)).block_ids == [0, 1, 2, 3]
    assert cache.match_prefix([*range(8), 90, 91, 92, 93]).block_ids == [0, 1, 12]


def test_prompts_that_differ_inside_their_first_block_share_nothing(cache):
    insert(cache, [1, 2, 3, 4, 5, 6, 7, 8], 0)
    insert(cache, [1, 2, 3, 9, 5, 6, 7, 8], 10)
    assert cache.metrics().num_nodes == 2
    assert cache.match_prefix([1, 2, 3, 9, 0]).block_ids == [10]


def test_a_growing_request_stays_one_node(cache):
    tokens = list(range(40))
    for num_blocks in range(1, 11):
        cache.insert_prefix(tokens, list(range(num_blocks)))
        cache.check_integrity()
    assert cache.metrics().num_nodes == 1


def test_a_locked_leaf_does_not_grow(cache):
    insert(cache, range(8), 0)
    match = cache.lock(cache.match_prefix(range(8)))
    insert(cache, range(16), 0)
    assert cache.metrics().num_nodes == 2
    assert cache.num_evictable_blocks == 2
    cache.unlock(match)
    assert cache.num_evictable_blocks == 4


def test_another_priority_begins_another_node(cache):
    cache.insert_prefix(range(8), [0, 1])
    cache.insert_prefix(range(16), [0, 1, 2, 3], priority=1)
    match = cache.match_prefix(range(16))
    assert isinstance(match.node, PrefixNode)
    assert match.node.priority == 1
    assert match.node.parent is not None
    assert match.node.parent.priority == 0


def test_a_split_does_not_make_other_matches_stale(cache):
    insert(cache, range(16), 0)
    matches = [cache.match_prefix(range(length)) for length in (4, 12, 16, 8)]
    locked = [cache.lock(match) for match in matches]
    cache.check_integrity()
    assert cache.evict(4) == []
    for match in locked:
        cache.unlock(match)
    assert sorted(cache.evict(4)) == [0, 1, 2, 3]


@pytest.mark.parametrize(("length", "reason"), [(3, "whole blocks of 4"), (12, "no longer than it was")])
def test_a_match_is_shortened_by_whole_blocks_and_never_lengthened(cache, length, reason):
    insert(cache, range(8), 0)
    match = cache.match_prefix(range(8))
    with pytest.raises(InvalidInputError, match=reason):
        cache.lock(match._replace(match_length=length))


def test_a_match_of_another_cache_is_refused(cache):
    other = RadixPrefixCache(100, 4)
    insert(cache, range(8), 0)
    insert(other, range(8), 0)
    for call in (cache.lock, cache.num_idle_blocks):
        with pytest.raises(StaleMatchError, match="another cache's"):
            call(other.match_prefix(range(8)))
    with pytest.raises(StaleMatchError):
        cache.lock(PrefixMatch(8, [0, 1], version=cache.match_prefix([]).version))


def test_a_namespace_without_blocks_leaves_nothing_behind(cache):
    for index in range(50):
        insert(cache, range(4), index, Namespace(salt=str(index)))
    assert len(cache.evict(50)) == 50
    assert not cache._tree.roots


def test_leaves_go_in_exact_lru_order():
    # The same operations on two caches: our order against a policy that looks at every leaf.
    random = Randomness(0).stream("lru")
    clock = VirtualClock()
    ours = RadixPrefixCache(60, 2, clock=clock)
    exact = RadixPrefixCache(60, 2, clock=clock, eviction_policy=AuditingEvictionPolicy())
    running = []
    for index in range(10_000):
        clock.advance_ns(random.randrange(2))  # equal times happen
        tokens = pack(random.choices((0, 1), k=random.randrange(20)))
        offered = list(range(10 * index, 10 * index + len(tokens) // 2))
        kind = random.randrange(8)
        if kind < 4:
            assert ours.insert_prefix(tokens, offered) == exact.insert_prefix(tokens, offered)
        elif kind == 4 and len(running) < 5:
            running.append([cache.lock(cache.match_prefix(tokens)) for cache in (ours, exact)])
        elif kind == 5 and running:
            for cache, match in zip((ours, exact), running.pop(random.randrange(len(running))), strict=True):
                cache.unlock(match)
        elif kind > 5:
            wanted = random.randrange(1, 5)
            assert ours.evict(wanted) == exact.evict(wanted)


def test_last_use_takes_over_from_a_policy_that_names_a_locked_node():
    class Stubborn(AuditingEvictionPolicy):
        def victim(self):
            return max(self.nodes.values(), key=lambda node: node.node_id, default=None)

    cache = RadixPrefixCache(100, 4, eviction_policy=Stubborn())
    insert(cache, range(8), 0)
    insert(cache, range(50, 58), 10)
    cache.lock(cache.match_prefix(range(50, 58)))
    assert sorted(cache.evict(4)) == [0, 1], "all that may go"
    assert cache.metrics().policy_failure == (
        f"{Stubborn.__qualname__}: PluginError: it chose node 2, which is not a leaf or is locked"
    )
    cache.check_integrity()


def test_a_tree_deeper_than_the_recursion_limit_is_cleared_and_checked():
    depth = sys.getrecursionlimit() + 100
    cache = RadixPrefixCache(depth, 1)
    tokens = pack(range(depth))
    locked = []
    for length in range(1, depth + 1):
        cache.insert_prefix(tokens[:length], list(range(length)))
        locked.append(cache.lock(cache.match_prefix(tokens[:length])))
    assert cache.metrics().num_nodes == depth
    cache.check_integrity()
    assert cache.clear() == []
    for match in locked:
        cache.unlock(match)
    assert len(cache.clear()) == depth
    cache.check_integrity()


def test_try_reuse_returns_blocks_or_none(cache):
    insert(cache, range(8), 0)
    reuse = CrossRequestKVCache(cache)
    found = reuse.try_reuse([*range(8), 99])
    assert found is not None
    assert [block.block_id for block in found] == [0, 1]
    assert reuse.try_reuse(range(8), min_match_length=9) is None
    assert reuse.try_reuse(range(8), namespace=Namespace("other")) is None
    assert cache.metrics().num_lookups == 3


def test_the_integrity_check_sees_damage(cache):
    insert(cache, range(16), 0)
    insert(cache, [*range(8), 90, 91, 92, 93], 10)
    node = cache.match_prefix(range(16)).node
    node.lock_count += 1
    with pytest.raises(AssertionError, match="locks"):
        cache.check_integrity()
    node.lock_count -= 1
    node.block_ids[0] = 0
    with pytest.raises(AssertionError, match="twice"):
        cache.check_integrity()


@pytest.mark.parametrize("wrong", [True, "7", 7.0, -1, None, [7]])
def test_an_id_that_is_none_is_refused_before_anything_changes(wrong):
    cache = RadixPrefixCache(20, 2)
    cache.insert_prefix([1, 2], [0])
    before = cache.metrics()
    with pytest.raises(BlockError, match="block id"):
        cache.insert_prefix([1, 2, 3, 4, 5, 6], [0, wrong, 3])
    with pytest.raises(BlockError, match="block id"):
        cache.insert_prefix([1, 2], [wrong])
    assert cache.metrics() == before
    cache.check_integrity()


def test_the_name_of_a_policy_or_a_cache_is_refused_at_once():
    with pytest.raises(ConfigError, match=r"eviction_policy is 'lru'; .*resolve\('eviction_policy', 'lru'\)"):
        RadixPrefixCache(eviction_policy="lru")
    with pytest.raises(ConfigError, match=r"is the class RadixPrefixCache; .* make one"):
        CrossRequestKVCache(RadixPrefixCache)
