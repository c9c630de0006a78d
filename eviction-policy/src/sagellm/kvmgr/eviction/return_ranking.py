"""Leaves in the order of what their room earns, which changes with time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from heapq import heappop, heappush
from typing import Literal, NamedTuple, TypeAlias

from sagellm.core.ids import NodeId

Index = Callable[[float, float, float], float]
"""Chance of a return, scale of the gap (s), age (s) → what the room earns."""

_CHANCES = 16
_SCALES_AN_E_FOLD = 2
_REBUILT_AFTER_S = 0.25

LEFT_BEHIND, END, LIVE = 0, 1, 2
"""What goes first: what a conversation left behind, the last blocks of turns, all others."""

_Group: TypeAlias = tuple[int, int, int]  # rank, chance, scale
_Side: TypeAlias = Literal[1, -1]  # oldest first, newest first
_SIDES: tuple[_Side, ...] = (1, -1)


class Place(NamedTuple):
    """Where a leaf stands. Leaves of one group differ in their age alone."""

    rank: int
    chance: float
    scale_s: float
    time_s: float  # of its turn
    group: _Group

    @classmethod
    def of(cls, rank: int, chance: float, scale_s: float, time_s: float) -> Place:
        """Find the group."""
        if rank != LIVE:
            return cls(rank, chance, scale_s, time_s, (rank, 0, 0))
        scale = round(math.log(scale_s) * _SCALES_AN_E_FOLD)
        group = (LIVE, min(_CHANCES - 1, int(chance * _CHANCES)), scale)
        return cls(rank, chance, scale_s, time_s, group)


_Entry: TypeAlias = tuple[tuple[int, float], NodeId, Place, Literal[1, -1, 0]]
"""Key, node, place, and which end of its group it is: 0 for a leaf that was added since."""

_Aged: TypeAlias = tuple[float, NodeId, Place]


class _Ages:
    """The leaves of a group by time, for both ends; which of them are stale the caller knows.

    Those that come in the order of time, as most do, wait in a queue that both ends share.
    """

    def __init__(self) -> None:
        self._queue: deque[_Aged] = deque()
        self._heaps: dict[_Side, list[_Aged]] = {1: [], -1: []}  # all others, in both

    def __len__(self) -> int:
        return len(self._queue) + len(self._heaps[1])

    def add(self, node_id: NodeId, place: Place) -> None:
        """Take a leaf in."""
        queue = self._queue
        if not queue or queue[-1][0] <= place.time_s:
            queue.append((place.time_s, node_id, place))
        else:
            for side, heap in self._heaps.items():
                heappush(heap, (side * place.time_s, node_id, place))

    def end(self, side: _Side, live: Mapping[NodeId, Place]) -> _Aged | None:
        """Return the oldest (1) or newest (-1) leaf; stale ones before it go."""
        queue, heap = self._queue, self._heaps[side]
        index, drop = (0, queue.popleft) if side == 1 else (-1, queue.pop)
        while queue and live.get(queue[index][1]) is not queue[index][2]:
            drop()
        while heap and live.get(heap[0][1]) is not heap[0][2]:
            heappop(heap)
        if not heap:
            return queue[index] if queue else None
        if queue and side * queue[index][0] <= heap[0][0]:
            return queue[index]
        return heap[0]


class ReturnRanking:
    """Leaves by group, each group by time.

    The index of equal conversations rises with their age until most are back, and falls after, so that
    the smallest one of a group is at one of its ends. Both ends of all groups wait in one heap, which
    is built anew when time has moved on: O(log leaves) a call, amortised.
    """

    def __init__(self, index: Index) -> None:
        self._index = index
        self._places: dict[NodeId, Place] = {}  # any other place of a node is stale
        self._groups: dict[_Group, _Ages] = {}
        self._heap: list[_Entry] = []
        self._built_s = -math.inf

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, node_id: NodeId) -> bool:
        return node_id in self._places

    def add(self, node_id: NodeId, place: Place, now_s: float) -> None:
        """Put a leaf in its place; one that is there already moves."""
        self._places[node_id] = place
        ages = self._groups.get(place.group)
        if ages is None:
            ages = self._groups[place.group] = _Ages()
        ages.add(node_id, place)
        heappush(self._heap, (self._key(place, now_s), node_id, place, 0))

    def discard(self, node_id: NodeId) -> None:
        """Take a leaf out, if it is in."""
        self._places.pop(node_id, None)

    def first(self, now_s: float) -> NodeId | None:
        """Return the leaf whose room earns least now."""
        if not now_s - self._built_s < _REBUILT_AFTER_S or len(self._heap) > 4 * len(self._places) + 256:
            self._build(now_s)
        heap, places = self._heap, self._places
        while heap:
            _, node_id, place, side = heap[0]
            if places.get(node_id) is place:
                return node_id
            heappop(heap)
            if side:
                self._offer(place.group, side, now_s)
        return None

    def _build(self, now_s: float) -> None:
        self._built_s = now_s
        self._heap = []
        if sum(map(len, self._groups.values())) > 3 * len(self._places) + 256:
            self._groups = {}
            for node_id, place in sorted(self._places.items(), key=lambda item: item[1].time_s):
                self._groups.setdefault(place.group, _Ages()).add(node_id, place)
        for group in list(self._groups):
            for side in _SIDES:
                self._offer(group, side, now_s)

    def _offer(self, group: _Group, side: _Side, now_s: float) -> None:
        """Put the end of a group into the heap."""
        found = self._groups[group].end(side, self._places)
        if found is not None:
            _, node_id, place = found
            heappush(self._heap, (self._key(place, now_s), node_id, place, side))
        else:
            self._groups[group] = _Ages()

    def _key(self, place: Place, now_s: float) -> tuple[int, float]:
        if place.rank != LIVE:
            return place.rank, place.time_s
        return LIVE, self._index(place.chance, place.scale_s, max(0.0, now_s - place.time_s))
