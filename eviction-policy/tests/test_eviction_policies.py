from __future__ import annotations

import pytest

from sagellm.core import EvictionCandidate, NodeId
from sagellm.kvmgr.eviction import (
    ARCEvictionPolicy,
    CostEvictionPolicy,
    FIFOEvictionPolicy,
    LFUEvictionPolicy,
    LRUEvictionPolicy,
    S3FIFOEvictionPolicy,
    SLRUEvictionPolicy,
)
from sagellm.testing import RankingEvictionPolicyContract
from sagellm.testing.eviction import make_node


class TestLRUEvictionPolicy(RankingEvictionPolicyContract):
    def make(self):
        return LRUEvictionPolicy()

    def rank(self, node):
        return node.last_access_ns, node.node_id


class TestFIFOEvictionPolicy(RankingEvictionPolicyContract):
    def make(self):
        return FIFOEvictionPolicy()

    def rank(self, node):
        return node.created_ns, node.node_id


class TestLFUEvictionPolicy(RankingEvictionPolicyContract):
    def make(self):
        return LFUEvictionPolicy()

    def rank(self, node):
        return node.access_count, node.last_access_ns, node.node_id


class TestCostEvictionPolicy(RankingEvictionPolicyContract):
    def make(self):
        return CostEvictionPolicy()


class TestSLRUEvictionPolicy(RankingEvictionPolicyContract):
    def make(self):
        return SLRUEvictionPolicy()


class TestARCEvictionPolicy(RankingEvictionPolicyContract):
    def make(self):
        return ARCEvictionPolicy()


class TestS3FIFOEvictionPolicy(RankingEvictionPolicyContract):
    def make(self):
        return S3FIFOEvictionPolicy()


def candidate(sequence_id, last_access_time=0.0, num_blocks=1, **values):
    first = 100 * int(sequence_id)
    block_ids = range(first, first + num_blocks)
    return EvictionCandidate(
        sequence_id=sequence_id, block_ids=block_ids, last_access_time=last_access_time, **values
    )


def test_lru_chooses_the_sequence_that_was_idle_longest():
    candidates = [
        candidate("1", 3.0),
        candidate("2", 1.0, 2),
        candidate("3", 2.0),
        candidate("4", 0.0, is_pinned=True),
    ]
    assert LRUEvictionPolicy().select_victims(candidates, 3) == ["2", "3"]
    assert LRUEvictionPolicy().select_victims(candidates, 9) == ["2", "3", "1"]


def test_fifo_chooses_sequences_in_the_order_given():
    candidates = [candidate("1", 3.0), candidate("2", 1.0, 2), candidate("3", 2.0)]
    assert FIFOEvictionPolicy().select_victims(candidates, 2) == ["1", "2"]


def test_equal_sequences_go_in_the_order_given():
    assert LRUEvictionPolicy().select_victims([candidate("2"), candidate("1")], 2) == ["2", "1"]


def test_a_hit_keeps_a_node_under_lru_and_not_under_fifo():
    for policy, expected in ((LRUEvictionPolicy(), 2), (FIFOEvictionPolicy(), 1)):
        nodes = [make_node(1), make_node(2)]
        for node in nodes:
            policy.on_insert(node)
            policy.add_candidate(node)
        nodes[0].last_access_ns = 10
        policy.on_hit(nodes[0])
        victim = policy.victim()
        assert victim is not None
        assert victim.node_id == NodeId(expected)


def test_a_victim_that_stays_is_not_counted():
    policy = LRUEvictionPolicy()
    nodes = [make_node(1), make_node(2)]
    for node in nodes:
        policy.on_insert(node)
        policy.add_candidate(node)
    assert policy.victim() is nodes[0]
    policy.remove_candidate(nodes[1])
    policy.on_remove(nodes[1])
    assert policy.metrics().num_victims == 0
    assert policy.metrics().num_candidates == 1


def test_metrics_are_a_copy():
    policy = LRUEvictionPolicy()
    policy.metrics().num_hits = 7
    assert policy.metrics().num_hits == 0


@pytest.mark.parametrize("policy", [LRUEvictionPolicy(), FIFOEvictionPolicy()])
def test_coming_and_going_leaves_no_garbage(policy):
    nodes = [make_node(node_id) for node_id in range(8)]
    for node in nodes:
        policy.on_insert(node)
    for round_ns in range(1_000):
        for node in nodes:
            node.last_access_ns = round_ns
            policy.add_candidate(node)
        for node in reversed(nodes):
            policy.remove_candidate(node)
            policy.add_candidate(node)
            policy.remove_candidate(node)
    ranking = policy._ranking
    assert sum(map(len, ranking._queues)) + len(ranking._heap) < 3 * len(nodes) + 100
    assert policy.victim() is None


def test_cost_prefers_deep_and_used_nodes_and_grows_older():
    policy = CostEvictionPolicy(attention_depth=16)
    shallow, deep, used = make_node(1, depth=16), make_node(2, depth=160), make_node(3, access_count=9)
    for node in (shallow, deep, used):
        policy.on_insert(node)
        policy.add_candidate(node)
    order = []
    while (node := policy.victim()) is not None:
        order.append(node)
        policy.remove_candidate(node)
        policy.on_remove(node)
    assert order == [shallow, deep, used]
    late, dear = make_node(4, depth=16), make_node(5, depth=16, access_count=1)
    for node in (late, dear):
        policy.on_insert(node)
        policy.add_candidate(node)
    assert policy.victim() is late
    assert policy._ranking.key_of(late) > 20, "what came later is not measured by what was dear before"
