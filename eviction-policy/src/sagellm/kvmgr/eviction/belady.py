"""Belady's optimum, which knows the future: a bound for replays, of no use in an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import heappop, heappush

from sagellm.core.errors import ConfigError
from sagellm.core.ids import NodeId, SequenceId
from sagellm.core.protocols.eviction import (
    CachedNode,
    EvictionCandidate,
    EvictionMetrics,
    EvictionPolicyProtocol,
)

NextUse = Callable[[CachedNode], float]
"""The time of the next use of a node's last block, in any unit; infinity for never."""


class BeladyEvictionPolicy(EvictionPolicyProtocol):
    """Evicts the leaf whose last block is used again latest, or never.

    After L. A. Belady, "A study of replacement algorithms for a virtual-storage computer" (1966), for
    a tree: a parent is never used later than its children, so only leaves compete. It is optimal
    if the cache evicts block by block. Only a replay can supply `next_use`; without it, this policy is
    refused.
    """

    def __init__(self, *, next_use: NextUse | None = None) -> None:
        if next_use is None:
            raise ConfigError(
                "the eviction policy belady needs to know the future: `sage llm simulate` does; "
                "name another in prefix_cache.eviction_policy"
            )
        self._next_use = next_use
        self._heap: list[tuple[float, NodeId, CachedNode]] = []  # latest next use first; some stale
        self._live: dict[NodeId, float] = {}  # the valid heap entry of each candidate
        self._metrics = EvictionMetrics()

    def on_insert(self, node: CachedNode) -> None:
        """Count it."""
        self._metrics.num_inserted += 1

    def on_hit(self, node: CachedNode) -> None:
        """Count it."""
        self._metrics.num_hits += 1

    def on_remove(self, node: CachedNode) -> None:
        """Forget it."""
        self._live.pop(node.node_id, None)
        self._metrics.num_victims += 1

    def add_candidate(self, node: CachedNode) -> None:
        """Rank it by its current next use."""
        key = -self._next_use(node)
        self._live[node.node_id] = key
        heappush(self._heap, (key, node.node_id, node))

    def remove_candidate(self, node: CachedNode) -> None:
        """Remove it from the ranking."""
        self._live.pop(node.node_id, None)

    def victim(self) -> CachedNode | None:
        """Return the candidate with the latest next use; rank a shortened one again."""
        heap, live = self._heap, self._live
        while heap:
            key, node_id, node = heap[0]
            if live.get(node_id) != key:
                heappop(heap)
            elif -self._next_use(node) != key:
                heappop(heap)
                self.add_candidate(node)
            else:
                return node
        return None

    def select_victims(
        self, candidates: Sequence[EvictionCandidate], required_blocks: int
    ) -> list[SequenceId]:
        """Refuse: a sequence's next use is unknown. Raises ConfigError."""
        raise ConfigError("belady chooses among the nodes of a replay, not among sequences")

    def metrics(self) -> EvictionMetrics:
        """Return the counts so far."""
        return replace(self._metrics, num_candidates=len(self._live), details={})
