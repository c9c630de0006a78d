"""Belady's policy: the leaf that is used last goes first, and nothing works without the future."""

import pytest

from sagellm.core import CachedNode, ConfigError
from sagellm.core.ids import NodeId
from sagellm.kvmgr.eviction import BeladyEvictionPolicy

NEVER = float("inf")


def node(number: int) -> CachedNode:
    return CachedNode(node_id=NodeId(number), num_blocks=1, depth=16, created_ns=0, last_access_ns=0)


def test_the_latest_next_use_goes_first_and_is_looked_up_again():
    next_use = {1: 5.0, 2: NEVER, 3: 9.0}
    policy = BeladyEvictionPolicy(next_use=lambda node: next_use[node.node_id])
    nodes = [node(number) for number in next_use]
    for each in nodes:
        policy.on_insert(each)
        policy.add_candidate(each)
    assert policy.victim() is nodes[1]
    next_use[2] = 7.0  # it gave up its end
    assert policy.victim() is nodes[2]
    policy.remove_candidate(nodes[2])
    policy.on_remove(nodes[2])
    assert policy.victim() is nodes[1]
    policy.remove_candidate(nodes[1])
    policy.remove_candidate(nodes[0])
    assert policy.victim() is None
    metrics = policy.metrics()
    assert (metrics.num_inserted, metrics.num_victims, metrics.num_candidates) == (3, 1, 0)


def test_without_the_future_it_is_refused():
    with pytest.raises(ConfigError, match="needs to know the future"):
        BeladyEvictionPolicy()
    with pytest.raises(ConfigError, match="not among sequences"):
        BeladyEvictionPolicy(next_use=lambda _: NEVER).select_victims([], 1)
