"""The common part of policies that consist of a key function."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TypeAlias

from sagellm.core.ids import NodeId, SequenceId
from sagellm.core.node_ranking import NodeRanking, RankingKey
from sagellm.core.protocols.eviction import (
    CachedNode,
    EvictionCandidate,
    EvictionMetrics,
    EvictionPolicyProtocol,
)

SequenceKey: TypeAlias = Callable[[EvictionCandidate], float]


class RankedEvictionPolicy(EvictionPolicyProtocol):
    """An eviction policy defined by a key for nodes and keys for sequences.

    The smallest key goes first; equal nodes go by age. `sequence_keys` rank sequences, the most significant
    first; equal sequences go in the order given.
    """

    sequence_keys: tuple[SequenceKey, ...] = ()

    def __init__(self) -> None:
        self._ranking = NodeRanking(self.node_key)
        self._metrics = EvictionMetrics()
        self._named: NodeId | None = None  # the last victim, until it has left

    @abstractmethod
    def node_key(self, node: CachedNode) -> RankingKey:
        """Rank a leaf of the tree."""

    def on_insert(self, node: CachedNode) -> None:
        """Count it."""
        self._metrics.num_inserted += 1

    def on_hit(self, node: CachedNode) -> None:
        """Count it, and rank it again if it is a candidate: its key may have changed."""
        self._metrics.num_hits += 1
        if node in self._ranking:
            self._ranking.add(node)

    def on_remove(self, node: CachedNode) -> None:
        """Count it as a victim if it was the last one named."""
        if node.node_id == self._named:
            self._metrics.num_victims += 1
            self._named = None

    def add_candidate(self, node: CachedNode) -> None:
        """Add the node to the ranking."""
        self._ranking.add(node)

    def remove_candidate(self, node: CachedNode) -> None:
        """Remove the node from the ranking."""
        self._ranking.discard(node)

    def victim(self) -> CachedNode | None:
        """Return the candidate with the smallest key, or None if there is none."""
        node = self._ranking.first()
        self._named = None if node is None else node.node_id
        return node

    def victims(self, num_blocks: int) -> Iterator[CachedNode]:
        """Yield candidates by their keys; none if a subclass overrides `on_remove`."""
        if type(self).on_remove is not RankedEvictionPolicy.on_remove:
            return iter(())
        return self._ranking.take(num_blocks)

    def select_victims(
        self, candidates: Sequence[EvictionCandidate], required_blocks: int
    ) -> list[SequenceId]:
        """Choose sequences by their keys until their blocks cover `required_blocks`.

        A block shared by several counts once. O(candidates · log candidates), in a sort.
        """
        return choose(in_order(candidates, *self.sequence_keys), required_blocks)

    def metrics(self) -> EvictionMetrics:
        """Return the counts so far. A victim is counted when it leaves whole."""
        num_victims = self._metrics.num_victims + self._ranking.num_taken
        return replace(self._metrics, num_victims=num_victims, num_candidates=len(self._ranking), details={})


def in_order(candidates: Iterable[EvictionCandidate], *keys: SequenceKey) -> Iterator[EvictionCandidate]:
    """Yield sequences by keys, the first key first; equals are sorted only when reached."""
    if not keys:
        yield from candidates
        return
    first, *rest = keys
    ordered = sorted(candidates, key=first)
    if not rest:
        yield from ordered
        return
    for _, equals in groupby(ordered, first):
        yield from in_order(equals, *rest)


def choose(ordered: Iterable[EvictionCandidate], required_blocks: int) -> list[SequenceId]:
    """Take unpinned sequences, in order, until their blocks cover `required_blocks`."""
    chosen: list[SequenceId] = []
    covered: set[int] = set()
    for candidate in ordered:
        if len(covered) >= required_blocks:
            break
        if not candidate.is_pinned:
            chosen.append(SequenceId(candidate.sequence_id))
            covered.update(candidate.block_ids)
    return chosen
