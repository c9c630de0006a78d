"""Nodes of a prefix cache ordered by a key, with removal from anywhere."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from typing import TypeAlias

from sagellm.core.ids import NodeId
from sagellm.core.protocols.eviction import CachedNode

RankingKey: TypeAlias = float | tuple[float, ...]
"""What nodes are ranked by; all keys of one ranking have the same form."""

_Entry: TypeAlias = tuple[RankingKey, NodeId, CachedNode]

_MAX_STALE = 64
_MAX_QUEUES = 4


class NodeRanking:
    """Nodes by key, the older node first among equals. The key is read when a node is added.

    A node is appended, in O(1), to the first of a few queues whose last node goes before it; if there
    is none, it goes to a heap. So keys that mostly rise, each in its class, avoid the heap, where many
    nodes cost a cache miss per comparison. Removal takes a node out of its queue; in the heap it leaves a
    stale entry, dropped when it reaches the front, or with all others when there are many:
    O(log n) per call, amortised over the nodes in the heap.
    """

    def __init__(self, key: Callable[[CachedNode], RankingKey]) -> None:
        self._key = key
        self._queues: list[OrderedDict[NodeId, _Entry]] = []  # each strictly ascending
        self._lasts: list[_Entry] = []  # by queue, the last node added, whether or not it is still there
        self._heap: list[_Entry] = []
        self._heaped: dict[NodeId, _Entry] = {}  # any other entry of the heap is stale
        self.num_taken = 0  # by `take`

    def __len__(self) -> int:
        return sum(map(len, self._queues)) + len(self._heaped)

    def __contains__(self, node: CachedNode) -> bool:
        return self._find(node.node_id) is not None

    def add(self, node: CachedNode) -> None:
        """Add a node at its place; a node already there moves if its key has changed."""
        node_id = node.node_id
        entry = (self._key(node), node_id, node)
        before = self._find(node_id)
        if before is not None:
            if before[0] == entry[0]:
                return
            self.discard(node)
        for index, queue in enumerate(self._queues):
            if not queue or self._lasts[index] < entry:
                queue[node_id] = self._lasts[index] = entry
                return
        if len(self._queues) < _MAX_QUEUES:
            self._queues.append(OrderedDict({node_id: entry}))
            self._lasts.append(entry)
            return
        heappush(self._heap, entry)
        self._heaped[node_id] = entry
        if len(self._heap) > 2 * len(self._heaped) + _MAX_STALE:
            self._heap = list(self._heaped.values())
            heapify(self._heap)

    def discard(self, node: CachedNode) -> None:
        """Remove a node, if present."""
        node_id = node.node_id
        for queue in self._queues:
            if queue.pop(node_id, None) is not None:
                return
        self._heaped.pop(node_id, None)

    def first(self) -> CachedNode | None:
        """Return the node with the smallest key, or None."""
        best: _Entry | None = None
        for queue in self._queues:
            if queue:
                entry = next(iter(queue.values()))
                if best is None or entry < best:
                    best = entry
        heap = self._heap
        while heap and self._heaped.get(heap[0][1]) is not heap[0]:
            heappop(heap)
        if heap and (best is None or heap[0] < best):
            best = heap[0]
        return None if best is None else best[2]

    def take(self, num_blocks: int) -> Iterator[CachedNode]:
        """Remove and yield nodes in order, as long as whole ones fit into this many blocks together.

        Nodes may be added between two steps.
        """
        if len(self._queues) > 1:
            self._drop_empty()
        while num_blocks > 0:
            queue = self._queues[0] if len(self._queues) == 1 and not self._heap else None
            if queue:  # the usual case, without a call
                node_id, entry = queue.popitem(last=False)
                node = entry[2]
                if node.num_blocks > num_blocks:
                    queue[node_id] = entry
                    queue.move_to_end(node_id, last=False)
                    return
            else:
                found = self.first()
                if found is None or found.num_blocks > num_blocks:
                    return
                node = found
                self.discard(node)
            num_blocks -= node.num_blocks
            self.num_taken += 1
            yield node

    def key_of(self, node: CachedNode) -> RankingKey:
        """Return the key of a node as it was when the node was added. Raises KeyError."""
        found = self._find(node.node_id)
        if found is None:
            raise KeyError(node.node_id)
        return found[0]

    def keys(self) -> dict[NodeId, RankingKey]:
        """Return the key of each node as it was when the node was added."""
        return {
            node_id: entry[0]
            for entries in (*self._queues, self._heaped)
            for node_id, entry in entries.items()
        }

    def _drop_empty(self) -> None:
        kept = [index for index, queue in enumerate(self._queues) if queue]
        self._queues = [self._queues[index] for index in kept]
        self._lasts = [self._lasts[index] for index in kept]

    def _find(self, node_id: NodeId) -> _Entry | None:
        for queue in self._queues:
            if node_id in queue:
                return queue[node_id]
        return self._heaped.get(node_id)
