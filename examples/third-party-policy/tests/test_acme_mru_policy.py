"""The conformance kit of sageLLM, and what is special about this policy."""

from acme_mru.policy import MRUEvictionPolicy
from sagellm.core import CachedNode
from sagellm.testing import RankingEvictionPolicyContract


class TestMRUEvictionPolicy(RankingEvictionPolicyContract):
    def make(self) -> MRUEvictionPolicy:
        return MRUEvictionPolicy()

    def rank(self, node: CachedNode) -> tuple[int, int]:
        return -node.last_access_ns, -node.node_id


def test_a_node_that_comes_and_goes_leaves_no_rubbish_behind() -> None:
    policy = MRUEvictionPolicy()
    node = CachedNode(node_id=1, num_blocks=1, depth=16, created_ns=0, last_access_ns=0)
    policy.on_insert(node)
    for now in range(10_000):
        node.last_access_ns = now
        policy.add_candidate(node)
        policy.remove_candidate(node)
    assert len(policy._heap) < 100
