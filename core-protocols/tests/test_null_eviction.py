from __future__ import annotations

import pytest

from sagellm.core import EvictionMetrics
from sagellm.core.protocols.eviction import NullEvictionPolicy
from sagellm.testing import (
    AuditError,
    AuditingEvictionPolicy,
    EvictionPolicyContract,
    RankingEvictionPolicyContract,
)
from sagellm.testing.eviction import make_node


class TestNullEvictionPolicy(EvictionPolicyContract):
    def make(self) -> NullEvictionPolicy:
        return NullEvictionPolicy()


class TestAuditingEvictionPolicyIsAPolicyToo(RankingEvictionPolicyContract):
    num_operations = 1_000  # by brute force
    max_decision_s = 0.5
    max_growth = 100.0

    def make(self) -> AuditingEvictionPolicy:
        return AuditingEvictionPolicy()

    def rank(self, node):
        return node.last_access_ns, node.node_id


def test_everything_is_protected():
    policy, node = NullEvictionPolicy(), make_node(1)
    policy.on_insert(node)
    policy.add_candidate(node)
    assert policy.victim() is None
    assert policy.metrics() == EvictionMetrics()


@pytest.mark.parametrize("call", ["on_hit", "on_remove", "add_candidate", "remove_candidate"])
def test_the_audit_refuses_a_node_that_never_entered(call):
    with pytest.raises(AuditError, match="node 1"):
        getattr(AuditingEvictionPolicy(), call)(make_node(1))


def test_the_audit_refuses_a_node_that_leaves_as_a_candidate():
    policy, node = AuditingEvictionPolicy(), make_node(1)
    policy.on_insert(node)
    policy.add_candidate(node)
    with pytest.raises(AuditError, match="while it was a candidate"):
        policy.on_remove(node)
