from __future__ import annotations

from sagellm.core import NodeRanking, Randomness
from sagellm.testing.eviction import make_node


def test_nodes_come_out_by_key_and_equal_ones_by_age():
    ranking = NodeRanking(lambda node: node.last_access_ns)
    for node_id, key in ((3, 5), (1, 5), (2, 4), (5, 9), (4, 9)):
        ranking.add(make_node(node_id, last_access_ns=key))
    order = []
    while node := ranking.first():
        order.append(node.node_id)
        ranking.discard(node)
    assert order == [2, 1, 3, 4, 5]
    assert len(ranking) == 0


def test_adding_again_moves_a_node():
    ranking = NodeRanking(lambda node: node.last_access_ns)
    first, second = make_node(1, last_access_ns=1), make_node(2, last_access_ns=2)
    ranking.add(first)
    ranking.add(second)
    first.last_access_ns = 3
    ranking.add(first)
    assert ranking.first() is second
    second.last_access_ns = 9
    ranking.add(second)
    assert ranking.first() is first
    assert len(ranking) == 2
    assert first in ranking
    assert ranking.keys() == {1: 3, 2: 9}


def test_discarding_what_is_not_there_does_nothing():
    ranking = NodeRanking(lambda node: 0)
    ranking.discard(make_node(1))
    assert ranking.first() is None


def test_coming_and_going_leaves_no_garbage():
    ranking = NodeRanking(lambda node: node.last_access_ns)
    nodes = [make_node(1), make_node(2)]
    for time in range(1_000):
        for node, key in zip(nodes, (time, 0), strict=True):
            node.last_access_ns = key
            ranking.add(node)
            ranking.discard(node)
    assert len(ranking) == 0
    assert sum(map(len, ranking._queues)) + len(ranking._heap) < 100


def test_ten_thousand_random_changes_agree_with_sorting():
    random = Randomness(0).stream("ranking")
    ranking = NodeRanking(lambda node: node.last_access_ns)
    nodes = [make_node(node_id) for node_id in range(30)]
    live: dict[int, tuple[int, int]] = {}
    for _ in range(10_000):
        node = random.choice(nodes)
        if random.random() < 0.5:
            node.last_access_ns = random.randrange(20)
            ranking.add(node)
            live[node.node_id] = (node.last_access_ns, node.node_id)
        else:
            ranking.discard(node)
            live.pop(node.node_id, None)
        first = ranking.first()
        assert len(ranking) == len(live)
        assert (first is None) == (not live)
        if first is not None:
            assert first.node_id == min(live.values())[1]
