"""An eviction policy that audits the cache calling it."""

from __future__ import annotations

from collections.abc import Sequence

from sagellm.core.errors import AuditError
from sagellm.core.ids import NodeId, SequenceId
from sagellm.core.protocols.eviction import (
    CachedNode,
    EvictionCandidate,
    EvictionMetrics,
    EvictionPolicyProtocol,
)


class AuditingEvictionPolicy(EvictionPolicyProtocol):
    """Exact LRU by brute force that raises AuditError when a cache breaks the order of calls.

    To be passed to a prefix cache under test.
    """

    def __init__(self) -> None:
        self.nodes: dict[NodeId, CachedNode] = {}
        self.candidates: dict[NodeId, CachedNode] = {}
        self.num_hits = 0
        self.num_victims = 0
        self._named: NodeId | None = None
        self._seen: set[NodeId] = set()

    def on_insert(self, node: CachedNode) -> None:
        """Expect a new id."""
        _require(node.node_id not in self._seen, f"node {node.node_id} entered twice")
        self._seen.add(node.node_id)
        self.nodes[node.node_id] = node

    def on_hit(self, node: CachedNode) -> None:
        """Expect a known node whose counts are updated."""
        _require(self.nodes.get(node.node_id) is node, f"a hit on unknown node {node.node_id}")
        _require(node.access_count > 0, f"node {node.node_id} was hit before it was counted")
        self.num_hits += 1

    def on_remove(self, node: CachedNode) -> None:
        """Expect a known node that is no longer a candidate."""
        _require(self.nodes.pop(node.node_id, None) is node, f"unknown node {node.node_id} left")
        _require(node.node_id not in self.candidates, f"node {node.node_id} left while it was a candidate")
        self.num_victims += node.node_id == self._named

    def add_candidate(self, node: CachedNode) -> None:
        """Expect a known node that is not a candidate."""
        _require(self.nodes.get(node.node_id) is node, f"unknown node {node.node_id} as a candidate")
        _require(node.node_id not in self.candidates, f"node {node.node_id} became a candidate twice")
        self.candidates[node.node_id] = node

    def remove_candidate(self, node: CachedNode) -> None:
        """Expect a candidate."""
        _require(self.candidates.pop(node.node_id, None) is node, f"node {node.node_id} was no candidate")

    def victim(self) -> CachedNode | None:
        """Return the least recently used candidate, the older node among equals, by searching all."""
        nodes = self.candidates.values()
        node = min(nodes, key=lambda node: (node.last_access_ns, node.node_id), default=None)
        self._named = None if node is None else node.node_id
        return node

    def select_victims(
        self, candidates: Sequence[EvictionCandidate], required_blocks: int
    ) -> list[SequenceId]:
        """Choose by last use."""
        chosen: list[SequenceId] = []
        covered: set[int] = set()
        for candidate in sorted(candidates, key=lambda candidate: candidate.last_access_time):
            if len(covered) < required_blocks and not candidate.is_pinned:
                chosen.append(SequenceId(candidate.sequence_id))
                covered.update(candidate.block_ids)
        return chosen

    def metrics(self) -> EvictionMetrics:
        """Return what was seen."""
        return EvictionMetrics(
            num_inserted=len(self._seen),
            num_hits=self.num_hits,
            num_victims=self.num_victims,
            num_candidates=len(self.candidates),
        )


def _require(is_right: bool, message: str) -> None:  # noqa: FBT001
    if not is_right:
        raise AuditError(message)
