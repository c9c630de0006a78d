"""Most recently used first: for long lists of prompts that come round again and do not fit."""

from collections.abc import Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush

from sagellm.core import CachedNode, EvictionCandidate, EvictionMetrics, EvictionPolicyProtocol


class MRUEvictionPolicy(EvictionPolicyProtocol):
    """Evicts what was used last, of equals the newer one. O(log n) per call, amortized."""

    def __init__(self) -> None:
        self._leaves: dict[int, tuple[int, CachedNode]] = {}  # with the key under which each is in the heap
        self._heap: list[tuple[int, int]] = []  # (-last access, -node id), some of them stale
        self._metrics = EvictionMetrics()

    def on_insert(self, node: CachedNode) -> None:
        self._metrics.num_inserted += 1

    def on_hit(self, node: CachedNode) -> None:
        self._metrics.num_hits += 1

    def on_remove(self, node: CachedNode) -> None:
        self._metrics.num_victims += 1

    def add_candidate(self, node: CachedNode) -> None:
        self._leaves[node.node_id] = (-node.last_access_ns, node)
        heappush(self._heap, (-node.last_access_ns, -node.node_id))
        if len(self._heap) > 2 * len(self._leaves) + 64:
            self._heap = [(key, -node_id) for node_id, (key, _) in self._leaves.items()]
            heapify(self._heap)

    def remove_candidate(self, node: CachedNode) -> None:
        del self._leaves[node.node_id]

    def victim(self) -> CachedNode | None:
        while self._heap:
            key, negative_id = self._heap[0]
            current, node = self._leaves.get(-negative_id, (None, None))
            if current == key:
                return node
            heappop(self._heap)
        return None

    def select_victims(self, candidates: Sequence[EvictionCandidate], required_blocks: int) -> list[str]:
        chosen: list[str] = []
        covered: set[int] = set()
        for candidate in sorted(candidates, key=lambda one: -one.last_access_time):
            if len(covered) < required_blocks and not candidate.is_pinned:
                chosen.append(candidate.sequence_id)
                covered.update(candidate.block_ids)
        return chosen

    def metrics(self) -> EvictionMetrics:
        return replace(self._metrics, num_candidates=len(self._leaves))
