"""A good policy, and five that each do one thing otherwise."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from sagellm.core import (
    CachedNode,
    EvictionCandidate,
    EvictionMetrics,
    EvictionPolicyProtocol,
    NodeRanking,
    SequenceId,
)


class LeastRecent(EvictionPolicyProtocol):
    """Evicts what was not used for longest. This one keeps the contract."""

    def __init__(self) -> None:
        self._leaves = NodeRanking(self._key)
        self._metrics = EvictionMetrics()
        self._named: CachedNode | None = None

    def _key(self, node: CachedNode) -> tuple[float, ...]:
        return (node.last_access_ns,)

    def on_insert(self, node: CachedNode) -> None:
        self._metrics.num_inserted += 1

    def on_hit(self, node: CachedNode) -> None:
        self._metrics.num_hits += 1

    def on_remove(self, node: CachedNode) -> None:
        self._metrics.num_victims += node is self._named

    def add_candidate(self, node: CachedNode) -> None:
        self._leaves.add(node)

    def remove_candidate(self, node: CachedNode) -> None:
        self._leaves.discard(node)

    def victim(self) -> CachedNode | None:
        self._named = self._leaves.first()
        return self._named

    def select_victims(
        self, candidates: Sequence[EvictionCandidate], required_blocks: int
    ) -> list[SequenceId]:
        chosen: list[SequenceId] = []
        covered: set[int] = set()
        for candidate in sorted(candidates, key=lambda one: one.last_access_time):
            if len(covered) < required_blocks and self._may_go(candidate):
                chosen.append(candidate.sequence_id)
                covered.update(candidate.block_ids)
        return chosen

    def _may_go(self, candidate: EvictionCandidate) -> bool:
        return not candidate.is_pinned

    def metrics(self) -> EvictionMetrics:
        return replace(self._metrics, num_candidates=len(self._leaves))


class Greedy(LeastRecent):
    """Does not look whether a sequence is pinned."""

    def _may_go(self, candidate: EvictionCandidate) -> bool:
        return True


class Careless(LeastRecent):
    """Takes a node out when it leaves the tree, not when it is locked."""

    def remove_candidate(self, node: CachedNode) -> None:
        """It will leave soon."""

    def on_remove(self, node: CachedNode) -> None:
        super().on_remove(node)
        self._leaves.discard(node)


class Scan(LeastRecent):
    """Looks at all leaves for every victim."""

    def __init__(self) -> None:
        super().__init__()
        self._all: dict[int, CachedNode] = {}

    def add_candidate(self, node: CachedNode) -> None:
        self._all[node.node_id] = node

    def remove_candidate(self, node: CachedNode) -> None:
        self._all.pop(node.node_id, None)

    def victim(self) -> CachedNode | None:
        self._named = min(self._all.values(), key=lambda node: node.last_access_ns, default=None)
        return self._named

    def metrics(self) -> EvictionMetrics:
        return replace(self._metrics, num_candidates=len(self._all))


class Gossip(LeastRecent):
    """Spares what was often hit, by counts that all its instances have in common."""

    _hits: ClassVar[Counter[int]] = Counter()

    def _key(self, node: CachedNode) -> tuple[float, ...]:
        return (self._hits[node.node_id], node.last_access_ns)

    def on_hit(self, node: CachedNode) -> None:
        super().on_hit(node)
        self._hits[node.node_id] += 1


class Hoarder(LeastRecent):
    """Forgets no node that leaves."""

    def __init__(self) -> None:
        super().__init__()
        self._nodes: dict[int, CachedNode] = {}

    def on_insert(self, node: CachedNode) -> None:
        super().on_insert(node)
        self._nodes[node.node_id] = node
