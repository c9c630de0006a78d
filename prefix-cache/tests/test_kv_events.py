from __future__ import annotations

import pytest

from sagellm.core import AllBlocksCleared, BlockRemoved, BlockStored, Namespace, Randomness, VirtualClock
from sagellm.kvmgr.prefix_cache import RadixPrefixCache

NAMESPACES = (Namespace("a"), Namespace("b"), Namespace("b", "salt"), Namespace.public("docs"))


class Consumer:
    """Keeps a copy of the tree from events alone: each block by its hash, with its parent and its tokens."""

    def __init__(self):
        self.blocks = {}
        self.tokens = set()  # all tokens up to the end of each block, with whose they are

    def __call__(self, event):
        if isinstance(event, BlockStored):
            parent, ids, size = event.parent_block_hash, event.token_ids.tolist(), event.block_size
            before = () if parent is None else self.blocks[parent][1]
            for index, block_hash in enumerate(event.block_hashes):
                before += tuple(ids[index * size : (index + 1) * size])
                self.blocks[block_hash] = ((event.tenant, event.salt), before)
        elif isinstance(event, BlockRemoved):
            for block_hash in event.block_hashes:
                del self.blocks[block_hash]
        elif isinstance(event, AllBlocksCleared):
            self.blocks.clear()

    def contents(self):
        return sorted(self.blocks.values())


def contents(cache):
    found = []
    for node in cache._tree.nodes():
        path = b"".join(step.edge for step in reversed(node.path()))
        ids = memoryview(path).cast("i").tolist()
        whose = (node.namespace.account, node.namespace.salt)
        for end in range(node.start + cache.block_size, node.depth + 1, cache.block_size):
            found.append((whose, tuple(ids[:end])))
    return sorted(found)


def operate(cache, random, index):
    namespace = random.choice(NAMESPACES)
    tokens = random.choices((0, 1), k=random.randrange(24))
    match = cache.lock(cache.match_prefix(tokens, namespace), num_lookup_tokens=len(tokens))
    cache.insert_prefix(tokens, list(range(12 * index, 12 * index - (-len(tokens) // 2))), namespace)
    cache.unlock(match)
    if random.random() < 0.7:
        cache.evict(random.randrange(12), namespace=namespace)
    if random.random() < 0.002:
        cache.clear()


@pytest.mark.parametrize("num_operations", [5_000, pytest.param(100_000, marks=pytest.mark.full)])
def test_a_consumer_rebuilds_the_tree_from_the_events_alone(num_operations):
    cache = RadixPrefixCache(60, 2, clock=VirtualClock(), tenant_quotas={"a": 20})
    random = Randomness(5).stream("operations")
    early, late = Consumer(), Consumer()
    cache.subscribe(early)
    for index in range(num_operations):
        operate(cache, random, index)
        if index == num_operations // 2:
            cache.subscribe(late)
        if index % 500 == 0:
            assert early.contents() == contents(cache)
    assert early.contents() == late.contents() == contents(cache)
    assert len(early.blocks) > 20


def test_events_say_whose_why_and_where():
    cache = RadixPrefixCache(20, 4, tenant_quotas={"a": 2})
    events = []
    cache.subscribe(events.append)
    cache.insert_prefix(range(8), [0, 1], Namespace("a", adapter="lora"))
    cache.make_room(1, Namespace("a"))
    cache.evict(1)
    cache.insert_prefix(range(8), [0, 1], Namespace("b", "salt"))
    cache.clear()
    stored, quota, evicted, other, cleared, end = events
    assert (stored.tenant, stored.lora_name, stored.block_size, stored.tier) == ("a", "lora", 4, "device")
    assert stored.token_ids == list(range(8))
    assert stored.parent_block_hash is None
    assert [quota.reason, evicted.reason, cleared.reason] == ["quota", "evicted", "cleared"]
    assert quota.block_hashes + evicted.block_hashes == stored.block_hashes[::-1]
    assert (other.tenant, other.salt) == ("b", "salt")
    assert set(other.block_hashes).isdisjoint(stored.block_hashes)
    assert end == AllBlocksCleared()


def test_hashes_are_made_for_nobody_but_who_asks():
    cache = RadixPrefixCache(20, 4)
    cache.insert_prefix(range(8), [0, 1])
    assert all(node.hashes is None for node in cache._tree.nodes())
    cache.subscribe([].append)
    assert all(len(node.hashes) == 2 for node in cache._tree.nodes())


def test_a_sink_that_fails_costs_no_block_and_is_told_nothing_more():
    cache, calls = RadixPrefixCache(20, 4), []

    def fail(event):
        calls.append(event)
        raise RuntimeError("the consumer is gone")

    cache.subscribe(fail)
    cache.insert_prefix(range(8), [0, 1])
    cache.check_integrity()
    assert sorted(cache.evict(2)) == [0, 1]
    assert len(calls) == 1


def interrupted(cache, call, *, number):
    """Make a call that Ctrl-C ends while the block of this number, from 0, is shown before it goes."""
    shown = []

    def keep(evicted):
        shown.append(evicted)
        if len(shown) == number + 1:
            raise KeyboardInterrupt

    cache.keep_evicted(keep)
    with pytest.raises(KeyboardInterrupt):
        call()
    cache.keep_evicted(lambda evicted: None)
    cache.check_integrity()


@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize("quotas", [None, {"*": 6}])
def test_an_eviction_that_is_interrupted_loses_no_block(number, quotas):
    cache = RadixPrefixCache(max_blocks=16, block_size=2, tenant_quotas=quotas)
    for index in range(6):
        cache.insert_prefix([index, 7], [index], Namespace("a"))
    interrupted(cache, lambda: cache.evict(5, namespace=Namespace("b")), number=number)
    assert cache.num_evictable_blocks == 6
    assert len(cache._tree.cached) == 6 - number
    cache.move_blocks([(0, 10), (5, 15)])  # the first may have left, the second is cached
    cache.check_integrity()
    dropped = cache.evict(6)
    assert sorted(dropped) == [1, 2, 3, 4, 10, 15]
    assert cache.num_evictable_blocks == 0
    cache.check_integrity()


def test_blocks_of_a_quota_are_not_lost_if_what_follows_is_interrupted():
    cache = RadixPrefixCache(max_blocks=16, block_size=2, tenant_quotas={"a": 4})
    for index in range(4):
        cache.insert_prefix([index, 7], [index], Namespace("a"))
        cache.insert_prefix([index, 7], [index + 4], Namespace("b"))
    interrupted(cache, lambda: cache.evict(3, namespace=Namespace("a")), number=0)
    interrupted(cache, lambda: cache.evict(6, namespace=Namespace("a")), number=5)
    assert sorted(cache.evict(8)) == list(range(8))
    cache.check_integrity()


def test_a_part_of_a_leaf_that_could_not_be_shown_stays():
    cache = RadixPrefixCache(max_blocks=16, block_size=2)
    cache.insert_prefix(list(range(8)), [0, 1, 2, 3])
    interrupted(cache, lambda: cache.evict(2), number=0)
    assert cache.match_prefix(list(range(8))).block_ids == [0, 1, 2, 3]
    assert sorted(cache.evict(9)) == [0, 1, 2, 3]


def test_clearing_that_is_interrupted_loses_no_block():
    cache = RadixPrefixCache(max_blocks=16, block_size=2)
    for index in range(4):
        cache.insert_prefix([index, 7], [index])
    seen = []

    def sink(event):
        seen.append(event)
        if len(seen) == 6:  # the second block that leaves
            raise KeyboardInterrupt

    cache.subscribe(sink)
    with pytest.raises(KeyboardInterrupt):
        cache.clear()
    cache.check_integrity()
    assert sorted(cache.clear()) == [0, 1, 2, 3]
    cache.check_integrity()
