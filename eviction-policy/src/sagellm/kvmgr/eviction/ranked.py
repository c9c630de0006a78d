"""What all policies have in common that are a key function and nothing else."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from heapq import heapify, heappop

from sagellm.core.ids import BlockId, NodeId, SequenceId
from sagellm.core.node_ranking import NodeRanking, RankingKey
from sagellm.core.protocols.eviction import (
    CachedNode,
    EvictionCandidate,
    EvictionMetrics,
    EvictionPolicyProtocol,
)


class RankedEvictionPolicy(EvictionPolicyProtocol):
    """An eviction policy given by two keys, one for nodes and one for sequences.

    The smallest key goes first; equal nodes go by age, equal sequences in the order given.
    """

    def __init__(self) -> None:
        self._ranking = NodeRanking(self.node_key)
        self._metrics = EvictionMetrics()
        self._named: NodeId | None = None  # the last victim, until it has left

    @abstractmethod
    def node_key(self, node: CachedNode) -> RankingKey:
        """Rank a leaf of the tree."""

    @abstractmethod
    def candidate_key(self, candidate: EvictionCandidate) -> RankingKey:
        """Rank a sequence."""

    def on_insert(self, node: CachedNode) -> None:
        """Count it."""
        self._metrics.num_inserted += 1

    def on_hit(self, node: CachedNode) -> None:
        """Count it, and move the node if it may be chosen: its key may have changed."""
        self._metrics.num_hits += 1
        if node in self._ranking:
            self._ranking.add(node)

    def on_remove(self, node: CachedNode) -> None:
        """Forget the node; it is a victim if it was the last one named."""
        self._ranking.discard(node)
        if node.node_id == self._named:
            self._metrics.num_victims += 1
            self._named = None

    def add_candidate(self, node: CachedNode) -> None:
        """Rank the node among those that may be chosen."""
        self._ranking.add(node)

    def remove_candidate(self, node: CachedNode) -> None:
        """Take the node out of the ranking."""
        self._ranking.discard(node)

    def victim(self) -> CachedNode | None:
        """Return the candidate with the smallest key, or None when there is none."""
        node = self._ranking.first()
        self._named = None if node is None else node.node_id
        return node

    def select_victims(
        self, candidates: Sequence[EvictionCandidate], required_blocks: int
    ) -> list[SequenceId]:
        """Choose sequences by key until their blocks cover `required_blocks`.

        A block that several of them share counts once. O(candidates + chosen · log candidates).
        """
        heap = [
            (self.candidate_key(candidate), index)
            for index, candidate in enumerate(candidates)
            if not candidate.is_pinned
        ]
        heapify(heap)
        chosen: list[SequenceId] = []
        covered: set[BlockId] = set()
        while heap and len(covered) < required_blocks:
            candidate = candidates[heappop(heap)[1]]
            chosen.append(candidate.sequence_id)
            covered.update(candidate.block_ids)
        return chosen

    def metrics(self) -> EvictionMetrics:
        """Return the counts so far. A victim is counted when it leaves whole."""
        return replace(self._metrics, num_candidates=len(self._ranking), details={})
