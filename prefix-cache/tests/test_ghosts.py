"""What was evicted is remembered without its blocks, within a budget, and goes on where it comes back."""

from __future__ import annotations

import pytest

from sagellm.core import EvictionPolicyProtocol, Namespace, NodeId, VirtualClock
from sagellm.core.protocols.eviction import NullEvictionPolicy
from sagellm.kvmgr.prefix_cache import PrefixNode, RadixPrefixCache
from sagellm.kvmgr.prefix_cache.ghosts import Departure, Ghosts
from sagellm.kvmgr.prefix_cache.node import block_keys

SIZE = 4


class Watcher(NullEvictionPolicy):
    """Notes every node that enters, and evicts the leaf that came last."""

    def __init__(self) -> None:
        self.inserted: list[PrefixNode] = []
        self.leaves: dict[NodeId, PrefixNode] = {}

    def on_insert(self, node):
        self.inserted.append(node)

    def add_candidate(self, node):
        self.leaves[node.node_id] = node

    def remove_candidate(self, node):
        del self.leaves[node.node_id]

    def victim(self):
        return next(reversed(self.leaves.values()), None)


def make(policy: EvictionPolicyProtocol | None = None, **options) -> tuple[RadixPrefixCache, VirtualClock]:
    clock = VirtualClock(start_ns=100)
    return RadixPrefixCache(100, SIZE, eviction_policy=policy, clock=clock, **options), clock


def tokens(*names: int) -> list[int]:
    return [name for name in names for _ in range(SIZE)]


def test_what_comes_back_goes_on_from_what_it_was():
    watcher = Watcher()
    cache, clock = make(watcher)
    cache.insert_prefix(tokens(1, 2, 3), [0, 1, 2])
    for _ in range(3):
        cache.unlock(cache.lock(cache.match_prefix(tokens(1, 2, 3)), num_lookup_tokens=12))
    (former,) = watcher.inserted
    clock.advance_ns(50)
    assert len(cache.evict(3)) == 3
    clock.advance_ns(50)
    cache.insert_prefix(tokens(1, 2, 3, 4), [4, 5, 6, 7])
    back = watcher.inserted[-1]
    assert (back.former_id, back.former_access_ns, back.former_depth) == (former.node_id, 100, 3 * SIZE)
    assert (back.access_count, back.created_ns) == (4, 200)
    cache.check_integrity()


def test_the_end_that_a_leaf_gave_up_is_remembered_too():
    watcher = Watcher()
    cache, _ = make(watcher)
    cache.insert_prefix(tokens(1, 2, 3), [0, 1, 2])
    (former,) = watcher.inserted
    assert cache.evict(1) == [2]
    locked = cache.lock(cache.match_prefix(tokens(1, 2, 3)))
    cache.insert_prefix(tokens(1, 2, 3), [0, 1, 8])
    cache.unlock(locked)
    back = watcher.inserted[-1]
    assert (back.former_id, back.former_depth, back.depth) == (former.node_id, 3 * SIZE, 3 * SIZE)
    assert back.parent_id == former.node_id
    assert former.parent_id is None


def test_another_end_and_another_namespace_are_new():
    watcher = Watcher()
    cache, _ = make(watcher)
    cache.insert_prefix(tokens(1, 2), [0, 1])
    cache.evict(2)
    cache.insert_prefix(tokens(1, 3), [2, 3])
    assert (watcher.inserted[-1].former_depth, watcher.inserted[-1].access_count) == (SIZE, 1)
    cache.insert_prefix(tokens(1, 2), [4, 5], Namespace(tenant="b"))
    assert watcher.inserted[-1].former_id is None


def test_a_split_keeps_what_both_parts_were():
    watcher = Watcher()
    cache, _ = make(watcher)
    cache.insert_prefix(tokens(1, 2, 3, 4), [0, 1, 2, 3])
    cache.evict(1)
    cache.insert_prefix(tokens(1, 5), [0, 9])  # splits the shortened node, whose keys are known
    cache.evict(3)
    cache.lock(cache.match_prefix(tokens(1)))
    cache.insert_prefix(tokens(1, 2, 3, 4), [0, 11, 12, 13])
    assert watcher.inserted[-1].former_depth == 4 * SIZE
    cache.check_integrity()


def test_a_leaf_that_grows_again_in_place_leaves_no_ghost():
    cache, _ = make(Watcher())
    cache.insert_prefix(tokens(1, 2), [0, 1])
    cache.evict(1)
    assert len(cache._tree.ghosts) == 1
    cache.insert_prefix(tokens(1, 2), [0, 5])
    assert len(cache._tree.ghosts) == 0
    cache.check_integrity()


def make_node(number):
    return PrefixNode(
        node_id=NodeId(number),
        num_blocks=1,
        depth=1,
        created_ns=0,
        last_access_ns=0,
        access_count=0,
        edge=b"",
        block_ids=[],
    )


@pytest.mark.parametrize(("budget", "num_known"), [(0, 0), (2, 2), (10, 3)])
def test_the_budget_counts_blocks_and_the_oldest_go(budget, num_known):
    ghosts = Ghosts(budget)
    data = b"".join(bytes([name]) * 4 for name in (1, 2, 3))
    keys = block_keys(0, data, 4)
    for number, key in enumerate(keys):
        ghosts.remember([key], make_node(number), Departure(0, "evicted"))
    assert len(ghosts) == num_known
    runs = [
        ghosts.find_run(before, data, position, 4)
        for before, position in zip([0, *keys], range(0, 12, 4), strict=False)
    ]
    assert [run.num_blocks for run in runs] == [0] * (3 - num_known) + list(range(num_known, 0, -1))
    assert [run.is_forgotten for run in runs] == [True] * (3 - num_known) + [False] * num_known


def test_no_budget_remembers_nothing():
    watcher = Watcher()
    cache, _ = make(watcher, max_ghost_blocks=0)
    cache.insert_prefix(tokens(1, 2), [0, 1])
    cache.evict(2)
    cache.insert_prefix(tokens(1, 2), [0, 1])
    assert [node.former_id for node in watcher.inserted] == [None, None]
