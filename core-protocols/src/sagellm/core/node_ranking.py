"""Nodes of a prefix cache in the order of a key, with removal from anywhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from typing import TypeAlias

from sagellm.core.ids import NodeId
from sagellm.core.protocols.eviction import CachedNode

RankingKey: TypeAlias = float | tuple[float, ...]
"""What nodes are ranked by; all keys of one ranking are of one form."""

_Entry: TypeAlias = tuple[RankingKey, NodeId, CachedNode]

_MAX_STALE = 64
_MAX_QUEUES = 4


class NodeRanking:
    """Nodes by key, of equal keys the older node first. The key is read when a node is added.

    A node waits at the end of the first of a few queues whose last one goes before it, O(1), or if there
    is none in a heap. Keys that mostly rise, each in its class, so never meet a heap, which with many
    nodes costs a cache miss a comparison. Removal leaves a stale entry, which is dropped when it comes to
    the front, or with all others of its kind when there are many: O(log n) a call, amortised.
    """

    def __init__(self, key: Callable[[CachedNode], RankingKey]) -> None:
        self._key = key
        self._queues: list[deque[_Entry]] = []  # each strictly ascending
        self._heap: list[_Entry] = []
        self._live: dict[NodeId, _Entry] = {}  # any other entry is stale
        self._num_entries = 0
        self.num_taken = 0  # by `take`

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, node: CachedNode) -> bool:
        return node.node_id in self._live

    def add(self, node: CachedNode) -> None:
        """Put a node in its place; one that is there already moves if its key has changed."""
        key, live = self._key(node), self._live
        before = live.get(node.node_id)
        if before is not None and before[0] == key:
            return
        entry = live[node.node_id] = (key, node.node_id, node)
        self._put(entry)
        if self._num_entries > 2 * len(live) + _MAX_STALE:
            self._drop_stale()

    def discard(self, node: CachedNode) -> None:
        """Take a node out, if it is in."""
        self._live.pop(node.node_id, None)

    def first(self) -> CachedNode | None:
        """Return the node with the smallest key, or None."""
        live, heap = self._live, self._heap
        best: _Entry | None = None
        for queue in self._queues:
            while queue:
                entry = queue[0]
                if live.get(entry[1]) is entry:
                    if best is None or entry < best:
                        best = entry
                    break
                queue.popleft()
                self._num_entries -= 1
        while heap:
            entry = heap[0]
            if live.get(entry[1]) is entry:
                if best is None or entry < best:
                    best = entry
                break
            heappop(heap)
            self._num_entries -= 1
        return None if best is None else best[2]

    def take(self, num_blocks: int) -> Iterator[CachedNode]:
        """Remove and yield nodes in order, while whole ones fit into this many blocks together.

        Nodes may be added while it runs.
        """
        live = self._live
        while num_blocks > 0:
            queue = self._queues[0] if len(self._queues) == 1 and not self._heap else None
            if queue:  # the usual case, without a call
                entry = queue[0]
                if live.get(entry[1]) is not entry:
                    queue.popleft()
                    self._num_entries -= 1
                    continue
                node = entry[2]
            elif (found := self.first()) is not None:
                node = found
            else:
                return
            num_blocks -= node.num_blocks
            if num_blocks < 0:
                return
            if queue:
                queue.popleft()
                self._num_entries -= 1
            del live[node.node_id]
            self.num_taken += 1
            yield node

    def key_of(self, node: CachedNode) -> RankingKey:
        """Return the key of a node as it was when the node was added. Raises KeyError."""
        return self._live[node.node_id][0]

    def keys(self) -> dict[NodeId, RankingKey]:
        """Return the key of each node as it was when the node was added."""
        return {node_id: entry[0] for node_id, entry in self._live.items()}

    def _put(self, entry: _Entry) -> None:
        self._num_entries += 1
        for queue in self._queues:
            if not queue or queue[-1] < entry:
                queue.append(entry)
                return
        if len(self._queues) < _MAX_QUEUES:
            self._queues.append(deque((entry,)))
        else:
            heappush(self._heap, entry)

    def _drop_stale(self) -> None:
        live = self._live
        self._queues = [
            deque(entry for entry in queue if live.get(entry[1]) is entry) for queue in self._queues
        ]
        self._heap = [entry for entry in self._heap if live.get(entry[1]) is entry]
        heapify(self._heap)
        self._num_entries = len(live)
