"""Nodes of a prefix cache in the order of a key, with removal from anywhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import TypeAlias

from sagellm.core.ids import NodeId
from sagellm.core.protocols.eviction import CachedNode

RankingKey: TypeAlias = float | tuple[float, ...]
"""What nodes are ranked by; all keys of one ranking are of one form."""

_Entry: TypeAlias = tuple[RankingKey, NodeId, CachedNode]

_MAX_STALE = 64


class NodeRanking:
    """Nodes by key, of equal keys the older node first. The key is read when a node is added.

    Nodes that come in ascending order wait in a queue, O(1); the others wait in a heap. Removal
    leaves a stale entry, which is dropped when it comes to the front, or with all others of its
    kind when there are many: O(log n) a call, amortised.
    """

    def __init__(self, key: Callable[[CachedNode], RankingKey]) -> None:
        self._key = key
        self._queue: deque[_Entry] = deque()  # strictly ascending
        self._heap: list[_Entry] = []
        self._live: dict[NodeId, RankingKey] = {}  # an entry with another key is stale

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, node: CachedNode) -> bool:
        return node.node_id in self._live

    def add(self, node: CachedNode) -> None:
        """Put a node in its place; one that is there already moves."""
        key = self._key(node)
        entry = (key, node.node_id, node)
        self._live[node.node_id] = key
        queue, heap = self._queue, self._heap
        if not queue or queue[-1] < entry:
            queue.append(entry)
        else:
            heappush(heap, entry)
        if len(queue) + len(heap) > 3 * len(self._live) + _MAX_STALE:
            self._drop_stale()

    def discard(self, node: CachedNode) -> None:
        """Take a node out, if it is in."""
        self._live.pop(node.node_id, None)

    def first(self) -> CachedNode | None:
        """Return the node with the smallest key, or None."""
        queue, heap, live = self._queue, self._heap, self._live
        while queue and live.get(queue[0][1]) != queue[0][0]:
            queue.popleft()
        while heap and live.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        if not heap:
            return queue[0][2] if queue else None
        return min(queue[0], heap[0])[2] if queue else heap[0][2]

    def key_of(self, node: CachedNode) -> RankingKey:
        """Return the key of a node as it was when the node was added. Raises KeyError."""
        return self._live[node.node_id]

    def keys(self) -> dict[NodeId, RankingKey]:
        """Return the key of each node as it was when the node was added."""
        return dict(self._live)

    def _drop_stale(self) -> None:
        # A node that went and came back unchanged may stand in both, so up to twice the live ones stay.
        live = self._live
        self._queue = deque(entry for entry in self._queue if live.get(entry[1]) == entry[0])
        self._heap = [entry for entry in set(self._heap) if live.get(entry[1]) == entry[0]]
        heapify(self._heap)
