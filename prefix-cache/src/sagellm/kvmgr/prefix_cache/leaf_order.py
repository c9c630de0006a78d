"""In which order the cache gives up its leaves when it is handed no policy."""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush
from typing import Protocol, TypeAlias

from sagellm.core.ids import NodeId
from sagellm.core.protocols.eviction import CachedNode

_Entry: TypeAlias = tuple[int, NodeId, CachedNode]

_MAX_STALE = 64


class LeafOrder(Protocol):
    """The part of an eviction policy that a cache calls; EvictionPolicyProtocol says what it means."""

    def on_insert(self, node: CachedNode) -> None: ...  # noqa: D102
    def on_hit(self, node: CachedNode) -> None: ...  # noqa: D102
    def on_remove(self, node: CachedNode) -> None: ...  # noqa: D102
    def add_candidate(self, node: CachedNode) -> None: ...  # noqa: D102
    def remove_candidate(self, node: CachedNode) -> None: ...  # noqa: D102
    def victim(self) -> CachedNode | None: ...  # noqa: D102


class LeafLRU:
    """Unlocked leaves, least recently used first; of equal ones the older node.

    Most leaves come in the order of their use and wait in a queue, O(1); the others wait in a
    heap. Entries of what is no candidate any more are dropped when they come to the front, or
    all at once when there are many.
    """

    def __init__(self) -> None:
        self._queue: deque[_Entry] = deque()  # strictly ascending
        self._heap: list[_Entry] = []
        self._used_ns: dict[NodeId, int] = {}  # of the candidates; an entry that differs is stale

    def on_insert(self, node: CachedNode) -> None:
        """Recency is all that counts."""

    def on_hit(self, node: CachedNode) -> None:
        """The node is locked by now; its time is read when it becomes a candidate."""

    def on_remove(self, node: CachedNode) -> None:
        """It was taken from the candidates before."""

    def add_candidate(self, node: CachedNode) -> None:
        """Queue a leaf by the time of its last use."""
        entry = (node.last_access_ns, node.node_id, node)
        self._used_ns[node.node_id] = node.last_access_ns
        queue, heap = self._queue, self._heap
        if not queue or queue[-1] < entry:
            queue.append(entry)
        else:
            heappush(heap, entry)
        if len(queue) + len(heap) > 3 * len(self._used_ns) + _MAX_STALE:
            self._drop_stale()

    def remove_candidate(self, node: CachedNode) -> None:
        """Make its entry stale."""
        del self._used_ns[node.node_id]

    def victim(self) -> CachedNode | None:
        """Return the leaf that was not used for the longest time."""
        queue, heap, used_ns = self._queue, self._heap, self._used_ns
        while queue and used_ns.get(queue[0][1]) != queue[0][0]:
            queue.popleft()
        while heap and used_ns.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        if not heap:
            return queue[0][2] if queue else None
        return min(queue[0], heap[0])[2] if queue else heap[0][2]

    def candidates(self) -> dict[NodeId, int]:
        """Return each candidate's time of use as it was when it was queued."""
        return dict(self._used_ns)

    def _drop_stale(self) -> None:
        # A node that went and came back unchanged may stand in both, so up to twice the live ones stay.
        live = self._used_ns
        self._queue = deque(entry for entry in self._queue if live.get(entry[1]) == entry[0])
        self._heap = [entry for entry in set(self._heap) if live.get(entry[1]) == entry[0]]
        heapify(self._heap)
