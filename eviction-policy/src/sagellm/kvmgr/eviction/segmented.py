"""The common part of policies that keep their leaves in two queues."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from sagellm.core.ids import NodeId, SequenceId
from sagellm.core.node_ranking import NodeRanking
from sagellm.core.protocols.eviction import (
    CachedNode,
    EvictionCandidate,
    EvictionMetrics,
    EvictionPolicyProtocol,
)
from sagellm.kvmgr.eviction.lfu import LFUEvictionPolicy


class SegmentedEvictionPolicy(EvictionPolicyProtocol):
    """Two queues of nodes: the young, still on probation, and the kept.

    Every node is in one of them, `self.kept` holding the ids of the second; evictable leaves are
    ranked in each by `order`. Sizes count nodes. Subclasses decide where a node enters, what a hit does,
    and from which queue the next victim comes. `select_victims` takes the least often used sequences
    first.
    """

    def __init__(self) -> None:
        self.nodes: dict[NodeId, CachedNode] = {}
        self.kept: set[NodeId] = set()
        self.young_leaves, self.kept_leaves = NodeRanking(self.order), NodeRanking(self.order)
        self._by_use = LFUEvictionPolicy()
        self._metrics = EvictionMetrics()
        self._named: NodeId | None = None  # the last victim, until it has left

    def order(self, node: CachedNode) -> float:
        """Rank a leaf in its queue; the smallest goes first. By last use, in nanoseconds, by default."""
        return node.last_access_ns

    @abstractmethod
    def enter(self, node: CachedNode) -> None:
        """Choose the queue of a new node."""

    @abstractmethod
    def use(self, node: CachedNode) -> None:
        """Record a hit."""

    @abstractmethod
    def takes_young(self) -> bool:
        """Say from which queue the next victim comes, if both have leaves."""

    def leave(self, node: CachedNode) -> None:
        """Record that a node has left. Does nothing by default."""

    @property
    def num_young(self) -> int:
        """Nodes on probation."""
        return len(self.nodes) - len(self.kept)

    def keep(self, node: CachedNode, *, kept: bool = True) -> None:
        """Move a node to a queue."""
        is_leaf = node in self.young_leaves or node in self.kept_leaves
        self.remove_candidate(node)
        (self.kept.add if kept else self.kept.discard)(node.node_id)
        if is_leaf:
            self.add_candidate(node)

    def on_insert(self, node: CachedNode) -> None:
        """Put it into its initial queue."""
        self._metrics.num_inserted += 1
        self.nodes[node.node_id] = node
        self.enter(node)

    def on_split(self, upper: CachedNode, lower: CachedNode) -> None:
        """Put the new part where the old one is."""
        self._metrics.num_inserted += 1
        self.nodes[upper.node_id] = upper
        if lower.node_id in self.kept:
            self.kept.add(upper.node_id)

    def on_hit(self, node: CachedNode) -> None:
        """Count it."""
        self._metrics.num_hits += 1
        self.use(node)
        if node in self.young_leaves or node in self.kept_leaves:
            self.add_candidate(node)  # its place may have changed

    def on_remove(self, node: CachedNode) -> None:
        """Forget it."""
        if self.nodes.pop(node.node_id, None) is not None:
            self.leave(node)
        self.kept.discard(node.node_id)
        if node.node_id == self._named:
            self._metrics.num_victims += 1
            self._named = None

    def add_candidate(self, node: CachedNode) -> None:
        """Rank it in its queue."""
        (self.kept_leaves if node.node_id in self.kept else self.young_leaves).add(node)

    def remove_candidate(self, node: CachedNode) -> None:
        """Remove it from the ranking."""
        self.young_leaves.discard(node)
        self.kept_leaves.discard(node)

    def victim(self) -> CachedNode | None:
        """Return the first leaf of the queue whose turn it is."""
        young, kept = self.young_leaves, self.kept_leaves
        queue = young if young and (not kept or self.takes_young()) else kept
        node = queue.first()
        self._named = None if node is None else node.node_id
        return node

    def select_victims(
        self, candidates: Sequence[EvictionCandidate], required_blocks: int
    ) -> list[SequenceId]:
        """Choose sequences by number of uses until their blocks cover `required_blocks`."""
        return self._by_use.select_victims(candidates, required_blocks)

    def metrics(self) -> EvictionMetrics:
        """Return the counts so far."""
        details = {"num_young": float(self.num_young), "num_kept": float(len(self.kept))}
        num_candidates = len(self.young_leaves) + len(self.kept_leaves)
        return replace(self._metrics, num_candidates=num_candidates, details=details)
