"""Leaves ordered by what their room earns, which changes with time."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

from sagellm.kvmgr.eviction.return_model import NUM_CHANCES, ReturnModels

LEFT_BEHIND, END, LIVE = 0, 1, 2
"""Eviction order: what a conversation left behind, the last blocks of turns, all others."""

_SCALES_AN_E_FOLD = 4
_MAX_STALE = 256

_GroupName: TypeAlias = tuple[int, bool, int, int]  # rank, whether it is shared, chance, scale
_Side: TypeAlias = Literal[1, -1]  # oldest first, newest first
_SIDES: tuple[_Side, ...] = (1, -1)


class Sized(Protocol):
    """An object that can be ranked."""

    @property
    def num_blocks(self) -> int:
        """The number of blocks it takes up."""


_Leaf = TypeVar("_Leaf", bound=Sized)
_Entry: TypeAlias = "tuple[float, int, _Leaf, _Group[_Leaf]]"  # time of its turn, id, leaf, its group


class Place(NamedTuple):
    """Where a leaf stands. Leaves of one group differ only in age."""

    time_s: float  # of its turn
    group: _GroupName

    @classmethod
    def of(cls, rank: int, chance: float, scale_s: float, time_s: float, *, is_shared: bool = False) -> Place:
        """Find the group."""
        if rank != LIVE:
            return cls(time_s, (rank, False, 0, 0))
        scale = round(math.log(scale_s) * _SCALES_AN_E_FOLD)
        return cls(time_s, (LIVE, is_shared, min(NUM_CHANCES - 1, int(chance * NUM_CHANCES)), scale))


class _Group(Generic[_Leaf]):
    """The leaves of a group by time, accessible from both ends.

    Leaves that arrive in order of time, as most do, wait in a queue that both ends share; the others in one
    heap per end, and the ranking knows which heap entries are stale.
    """

    __slots__ = (
        "chance",
        "claims",
        "heaps",
        "is_shared",
        "name",
        "newest_s",
        "num_leaves",
        "queue",
        "rank",
        "scale_s",
    )

    def __init__(self, name: _GroupName) -> None:
        self.name = name
        self.num_leaves = 0
        self.rank, self.is_shared = name[:2]
        self.chance = (name[2] + 0.5) / NUM_CHANCES
        self.scale_s = math.exp(name[3] / _SCALES_AN_E_FOLD)
        self.queue: OrderedDict[int, _Entry[_Leaf]] = OrderedDict()
        self.newest_s = -math.inf  # of all leaves appended to the queue since it was empty
        self.heaps: dict[_Side, list[tuple[float, int, _Entry[_Leaf]]]] = {1: [], -1: []}
        self.claims: dict[_Side, _Claim[_Leaf] | None] = {1: None, -1: None}  # the only valid ones

    def add(self, entry: _Entry[_Leaf]) -> bool:
        """Add a leaf at its time; say whether it went to the heaps."""
        queue, time_s, leaf_id = self.queue, entry[0], entry[1]
        if not queue or self.newest_s <= time_s:
            queue[leaf_id] = entry
            self.newest_s = time_s
            return False
        if time_s <= next(iter(queue.values()))[0]:
            queue[leaf_id] = entry
            queue.move_to_end(leaf_id, last=False)
            return False
        for side, heap in self.heaps.items():
            heappush(heap, (side * time_s, leaf_id, entry))
        return True

    def end(self, side: _Side, live: dict[int, _Entry[_Leaf]]) -> _Entry[_Leaf] | None:
        """Return the oldest (1) or newest (-1) leaf; drop stale ones before it."""
        queue, heap = self.queue, self.heaps[side]
        in_queue = next(iter(queue.values()) if side == 1 else reversed(queue.values()), None)
        while heap and live.get(heap[0][1]) is not heap[0][2]:
            heappop(heap)
        if not heap or (in_queue is not None and side * in_queue[0] <= heap[0][0]):
            return in_queue
        return heap[0][2]


class _Claim(NamedTuple, Generic[_Leaf]):
    """The entry of one end of a group in the overall order, valid while its leaf's age is in a range."""

    key: tuple[int, float]  # rank, what the room earns
    number: int
    group: _Group[_Leaf]
    side: _Side
    from_s: float
    to_s: float


class ReturnRanking(Generic[_Leaf]):
    """Leaves by group, each group by time.

    The index of equal conversations rises with age until most are back, and then falls, so that
    the smallest index in a group is at one of its ends. Both ends of all groups wait in one heap, and in
    another for the time when their index changes: O(log groups) per call, amortised, and O(1) for
    the next leaf of the same end.
    """

    def __init__(self, model: ReturnModels) -> None:
        self._model = model
        self._live: dict[int, _Entry[_Leaf]] = {}  # any other entry of an id is stale
        self._groups: dict[_GroupName, _Group[_Leaf]] = {}
        self._heap: list[_Claim[_Leaf]] = []
        self._changes: list[tuple[float, int, _Claim[_Leaf]]] = []  # when a claim ends
        self._num_claims = self._num_heaped = 0
        self._version = model.version

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, leaf_id: int) -> bool:
        return leaf_id in self._live

    def add(self, leaf_id: int, leaf: _Leaf, place: Place, now_s: float) -> None:
        """Put a leaf in its place; a leaf that is already there moves."""
        time_s, name = place
        self.discard(leaf_id)
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = _Group(name)
        entry = self._live[leaf_id] = (time_s, leaf_id, leaf, group)
        group.num_leaves += 1
        self._num_heaped += group.add(entry)
        age_s = now_s - time_s
        for side, claim in group.claims.items():
            if claim is None or not claim.from_s <= age_s < claim.to_s:
                self._claim(group, side, now_s)
        if self._num_heaped > 3 * len(self._live) + _MAX_STALE:
            self._build(now_s)

    def discard(self, leaf_id: int) -> None:
        """Remove a leaf, if present."""
        entry = self._live.pop(leaf_id, None)
        if entry is None:
            return
        group = entry[3]
        group.queue.pop(leaf_id, None)
        group.num_leaves -= 1
        if not group.num_leaves:
            del self._groups[group.name]
            group.claims = dict.fromkeys(_SIDES)
            self._num_heaped -= len(group.heaps[1])
            for heap in group.heaps.values():
                heap.clear()  # stale entries and their group would keep each other alive

    def first(self, now_s: float) -> _Leaf | None:
        """Return the leaf whose room earns least now."""
        claim = self._best(now_s)
        if claim is None:
            return None
        found = claim.group.end(claim.side, self._live)
        assert found is not None, "a claim has a leaf"
        return found[2]

    def take(self, now_s: float, num_blocks: int, is_whole: Callable[[_Leaf], bool]) -> Iterator[_Leaf]:
        """Remove and yield whole leaves in order, at most this many blocks in total.

        Ends at the first leaf that exceeds the rest, or that gives up only its end, as is_whole says. Leaves
        may be added while it runs.
        """
        while num_blocks > 0 and (claim := self._best(now_s)) is not None:
            group = claim.group
            if group.rank == END:
                return
            oldest_s, newest_s = now_s - claim.to_s, now_s - claim.from_s
            while num_blocks and self._heap[0] is claim:
                found = group.end(claim.side, self._live)
                if found is None or not oldest_s < found[0] <= newest_s:
                    break
                leaf = found[2]
                num_blocks -= leaf.num_blocks
                if num_blocks < 0 or not is_whole(leaf):
                    return
                self.discard(found[1])
                yield leaf

    def _best(self, now_s: float) -> _Claim[_Leaf] | None:
        """Return the first valid claim."""
        num_waiting = max(len(self._heap), len(self._changes))
        if self._version != self._model.version or num_waiting > 8 * len(self._groups) + _MAX_STALE:
            self._build(now_s)
        changes, heap, live = self._changes, self._heap, self._live
        while changes and changes[0][0] <= now_s:
            claim = heappop(changes)[2]
            if claim.group.claims[claim.side] is claim:
                self._claim(claim.group, claim.side, now_s)
        while heap:
            claim = heap[0]
            group, side = claim.group, claim.side
            if group.claims[side] is not claim:
                heappop(heap)
                continue
            found = group.end(side, live)
            if found is not None and claim.from_s <= now_s - found[0] < claim.to_s:
                return claim
            heappop(heap)
            group.claims[side] = None
            self._claim(group, side, now_s)
        return None

    def _build(self, now_s: float) -> None:
        """Rebuild the order of ends. O(groups), and O(entries of heaps) if too many entries are stale."""
        self._version = self._model.version
        self._heap, self._changes = [], []
        if self._num_heaped > 3 * len(self._live) + _MAX_STALE:
            self._num_heaped = 0
            for group in self._groups.values():
                for side, heap in group.heaps.items():
                    group.heaps[side] = [each for each in heap if self._live.get(each[1]) is each[2]]
                    heapify(group.heaps[side])
                self._num_heaped += len(group.heaps[1])
        for group in self._groups.values():
            for side in _SIDES:
                group.claims[side] = None
                self._claim(group, side, now_s)

    def _claim(self, group: _Group[_Leaf], side: _Side, now_s: float) -> None:
        """Enter the end of a group in the overall order."""
        found = group.end(side, self._live)
        if found is None:
            return
        self._num_claims += 1
        number = self._num_claims
        if group.rank != LIVE:
            claim = _Claim((group.rank, 0.0), number, group, side, -math.inf, math.inf)
            if side == -1:
                return
        else:
            worth, from_s, to_s = self._model.worth(
                group.chance, group.scale_s, now_s - found[0], is_shared=group.is_shared
            )
            claim = _Claim((LIVE, worth), number, group, side, from_s, to_s)
            if to_s < math.inf:
                heappush(self._changes, (found[0] + to_s, number, claim))
        group.claims[side] = claim
        heappush(self._heap, claim)
