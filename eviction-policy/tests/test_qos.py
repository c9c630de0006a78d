"""Tenants share a cache by weight: who gives up, how much at once, and what is counted."""

from __future__ import annotations

from random import Random

import pytest

from sagellm.core import CachedNode, ConfigError, EvictionCandidate, Namespace, NodeId
from sagellm.kvmgr.eviction import QoSEvictionPolicy
from sagellm.testing import RankingEvictionPolicyContract


class TestQoSEvictionPolicy(RankingEvictionPolicyContract):
    def make(self):
        return QoSEvictionPolicy()

    def rank(self, node):
        return node.last_access_ns, node.node_id  # one tenant: LRU


class TestQoSOverReuse(RankingEvictionPolicyContract):
    def make(self):
        return QoSEvictionPolicy(within="reuse")


class Cache:
    """Flat: every node is a leaf."""

    def __init__(self, policy: QoSEvictionPolicy) -> None:
        self.policy = policy
        self.held: dict[str, int] = {}
        self.num_nodes = 0

    def insert(self, tenant: str, num_blocks: int = 1) -> CachedNode:
        self.num_nodes += 1
        node = CachedNode(
            node_id=NodeId(self.num_nodes),
            num_blocks=num_blocks,
            depth=16 * num_blocks,
            created_ns=self.num_nodes,
            last_access_ns=self.num_nodes,
            namespace=Namespace(tenant=tenant, salt=str(self.num_nodes % 2)),
        )
        self.held[tenant] = self.held.get(tenant, 0) + num_blocks
        self.policy.on_insert(node)
        self.policy.add_candidate(node)
        return node

    def evict(self, num_blocks: int) -> list[tuple[str, int]]:
        """Take blocks; returns who gave how many at a time."""
        taken = []
        while num_blocks and (node := self.policy.victim()) is not None:
            given = min(self.policy.num_victim_blocks(node, num_blocks), node.num_blocks)
            assert given >= 1
            num_blocks -= given
            self.held[node.namespace.tenant] -= given
            taken.append((node.namespace.tenant, given))
            if given == node.num_blocks:
                self.policy.remove_candidate(node)
                self.policy.on_remove(node)
            else:
                node.num_blocks -= given
        return taken


def test_the_tenant_that_holds_most_gives_up_and_the_others_nothing():
    cache = Cache(QoSEvictionPolicy())
    for _ in range(10):
        cache.insert("quiet")  # all older
    for _ in range(90):
        cache.insert("loud")
    cache.evict(60)
    assert cache.held == {"quiet": 10, "loud": 30}


def test_shares_follow_the_weights():
    cache = Cache(QoSEvictionPolicy(weights={"gold": 3.0}, default_weight=0.5))
    for _ in range(100):
        for tenant in ("gold", "silver", "bronze"):
            cache.insert(tenant)
    cache.evict(220)
    assert cache.held == {"gold": 60, "silver": 10, "bronze": 10}


def test_what_a_tenant_does_not_use_is_lent_until_it_comes():
    cache = Cache(QoSEvictionPolicy())
    for _ in range(100):
        cache.insert("first")
    for _ in range(100):  # a full cache of 100 blocks
        cache.evict(1)
        cache.insert("late")
    assert sorted(cache.held.values()) == [49, 51], "a block to and fro"


def test_a_long_leaf_gives_only_what_is_above_the_share():
    cache = Cache(QoSEvictionPolicy())
    cache.insert("quiet", 30)
    cache.insert("loud", 70)
    assert cache.evict(40)[0] == ("loud", 21), "down to 1 % below 50"
    assert cache.held == {"quiet": 30, "loud": 30}


def test_the_only_tenant_gives_all_that_is_wanted():
    cache = Cache(QoSEvictionPolicy())
    cache.insert("one", 70)
    assert cache.evict(69) == [("one", 69)]


def test_who_has_nothing_unlocked_is_passed_over_until_it_has():
    policy = QoSEvictionPolicy()
    cache = Cache(policy)
    locked = [cache.insert("loud") for _ in range(9)]
    for node in locked:
        policy.remove_candidate(node)
    quiet = cache.insert("quiet")
    assert policy.victim() is quiet
    policy.add_candidate(locked[3])
    assert policy.victim() is locked[3]


def test_a_leaf_that_grew_in_place_counts_with_what_it_is_now():
    policy = QoSEvictionPolicy()
    cache = Cache(policy)
    other = cache.insert("other", 5)
    grown = cache.insert("grown", 3)
    assert policy.victim() is other
    policy.remove_candidate(grown)
    policy.add_candidate(grown)  # its prefix is inserted again, with more blocks
    grown.num_blocks = 8
    assert policy.victim() is grown
    policy.on_split(
        upper := CachedNode(
            node_id=NodeId(9),
            num_blocks=6,
            depth=96,
            created_ns=0,
            last_access_ns=0,
            namespace=grown.namespace,
        ),
        grown,
    )
    grown.num_blocks = 2
    policy.remove_candidate(grown)
    assert policy.metrics().details == {"num_blocks[other]": 5.0, "num_blocks[grown]": 8.0}
    policy.on_remove(grown)
    policy.on_remove(upper)
    assert policy.metrics().details == {"num_blocks[other]": 5.0}


@pytest.mark.parametrize("within", ["lru", "reuse"])
def test_no_block_goes_from_below_a_share_to_above_one(within):
    random = Random(3)
    weights = {"a": 1.0, "b": 2.0, "c": 5.0}
    cache = Cache(QoSEvictionPolicy(weights=weights, within=within))
    for _ in range(3000):
        tenant = random.choice("aaaaaabc")
        num_new = random.randrange(1, 40)
        missing = sum(cache.held.values()) + num_new - 800
        while missing > 0:
            before = dict(cache.held)
            ((giver, given),) = cache.evict(1)
            missing -= given
            total = sum(before.values())
            present = sum(weights[name] for name, held in before.items() if held)
            share = total * weights[giver] / present
            assert before[giver] >= share - 1e-9
        cache.insert(tenant, num_new)
    assert cache.policy.metrics().details == {
        f"num_blocks[{name}]": held for name, held in cache.held.items() if held
    }
    assert len(cache.policy._heap) < 100


def test_sequences_go_by_tenant_then_by_last_use():
    def candidate(name, tenant, num_blocks, used, **values):
        return EvictionCandidate(
            sequence_id=name, tenant=tenant, block_ids=range(num_blocks), last_access_time=used, **values
        )

    candidates = [
        candidate("quiet", "a", 3, 0.0),
        candidate("old", "b", 4, 1.0),
        candidate("new", "b", 4, 2.0),
        candidate("pinned", "b", 4, 0.0, is_pinned=True),
    ]
    assert QoSEvictionPolicy().select_victims(candidates, 4) == ["old"]
    assert QoSEvictionPolicy(weights={"b": 8.0}).select_victims(candidates, 1) == ["quiet"]


def test_a_weight_that_is_none_is_refused():
    for weight in (0, -1.0, float("nan"), float("inf"), True, "2"):
        with pytest.raises(ConfigError, match="above 0"):
            QoSEvictionPolicy(weights={"a": weight})
    with pytest.raises(ConfigError, match="one of lru, reuse"):
        QoSEvictionPolicy(within="fifo")
