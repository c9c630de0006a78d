"""One pool that hands out KV in pieces of three sizes: tokens, pages, sequences."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Literal, NamedTuple, TypeAlias

from sagellm.core.errors import BlockError, ConfigError, OutOfBlocksError


class SizeClass:
    """Free pieces of one size, grouped by the larger piece that they are parts of.

    Pieces are taken from parents that are already broken up, and a parent is whole again when all its parts
    have been freed. So larger pieces stay whole.
    """

    def __init__(self, size: int, parent_size: int) -> None:
        self.size, self.parent_size = size, parent_size
        self._free: dict[int, list[int]] = {}  # by the start of the parent

    def take(self) -> int | None:
        """Return the start of a piece of a parent that is already broken up."""
        if not self._free:
            return None
        parent = next(iter(self._free))
        parts = self._free[parent]
        start = parts.pop()
        if not parts:
            del self._free[parent]
        return start

    def add(self, start: int) -> int | None:
        """Free a piece; if its parent is whole again, forget the parts and return the parent's start."""
        parent = start - start % self.parent_size
        parts = self._free.setdefault(parent, [])
        parts.append(start)
        if len(parts) < self.parent_size // self.size:
            return None
        del self._free[parent]
        return parent

    def break_up(self, parent: int) -> None:
        """Split a whole parent into parts, to be taken in ascending order."""
        self._free[parent] = list(reversed(range(parent, parent + self.parent_size, self.size)))

    def starts(self) -> list[int]:
        """Return the free pieces."""
        return [start for parts in self._free.values() for start in parts]


def pack(held: Collection[Extent], config: KVPoolConfig) -> list[tuple[Extent, Extent]]:
    """Return moves (from, to), each to a place that is empty once the moves before it are done.

    From tokens up to sequences, parts of the emptiest larger pieces move to the free places of the fullest;
    finally pieces at the end of the pool move to free places at its start. A piece may move once per size.
    """
    now = {extent: extent.start for extent in held}
    moves = []
    for level in reversed(range(len(LEVELS))):
        size = config.size_of(LEVELS[level])
        inside = LEVELS[level:]
        units = defaultdict(list)  # by start: a piece of this size, or the smaller ones in its place
        for extent, start in now.items():
            if extent.granularity in inside:
                units[start - start % size].append(extent)
        kept: Collection[int]
        if level:
            kept = _fullest(units, size, config.size_of(LEVELS[level - 1]))
        else:
            kept = range(0, len(units) * size, size)
        leaving = [start for start in units if start not in kept]
        free = [start for start in kept if start not in units]
        for source, target in zip(leaving, free, strict=False):
            for extent in units[source]:
                before = Extent(extent.granularity, now[extent])
                now[extent] += target - source
                moves.append((before, Extent(extent.granularity, now[extent])))
    return moves


def _fullest(units: Collection[int], size: int, parent_size: int) -> dict[int, None]:
    """Return all places in the fullest parents, as many parents as the units fill."""
    num_units = Counter(start - start % parent_size for start in units)
    num_kept = -(-len(units) * size // parent_size)
    return {
        start: None
        for parent, _ in num_units.most_common(num_kept)
        for start in range(parent, parent + parent_size, size)
    }


Granularity: TypeAlias = Literal["sequence", "page", "token"]

LEVELS: tuple[Granularity, ...] = ("sequence", "page", "token")


@dataclass(frozen=True, kw_only=True)
class KVPoolConfig:
    """Sizes of a pool in tokens; each must divide the next larger one, or ConfigError is raised."""

    total_tokens: int
    sequence_tokens: int = 1024
    page_tokens: int = 16

    def __post_init__(self) -> None:
        sizes = (self.total_tokens, self.sequence_tokens, self.page_tokens)
        if any(type(size) is not int or size < 1 for size in sizes):
            raise ConfigError(f"sizes of a pool are whole numbers of tokens, at least 1, not {sizes}")
        for name, large, small in (
            ("total_tokens", self.total_tokens, self.sequence_tokens),
            ("sequence_tokens", self.sequence_tokens, self.page_tokens),
        ):
            if large % small:
                raise ConfigError(f"{name} is {large}; it must be a multiple of {small}")

    def size_of(self, granularity: Granularity) -> int:
        """Return how many tokens a piece of this size holds."""
        sizes = {"sequence": self.sequence_tokens, "page": self.page_tokens, "token": 1}
        return sizes[granularity]


class Extent(NamedTuple):
    """A run of tokens in the pool, handed out as one piece."""

    granularity: Granularity
    start: int


@dataclass(frozen=True, kw_only=True)
class MultiGranularMetrics:
    """The state of a pool, in tokens; `num_extents` is by size."""

    total_tokens: int
    free_tokens: int
    num_extents: dict[Granularity, int]
    largest_free_run: int  # tokens
    whole_tokens: int  # free, in whole sequence pieces
    num_fallbacks: int  # sequence pieces replaced by pages, and pages by tokens

    @property
    def external_fragmentation(self) -> float:
        """1 - largest free run ÷ free tokens; 0 when nothing is free."""
        return 1 - self.largest_free_run / self.free_tokens if self.free_tokens else 0.0


class MultiGranularKVPool:
    """Gives a sequence whole sequence pieces, then pages, then single tokens, so that nothing is wasted.

    `allocate(num_tokens)` covers the tokens exactly. If a size has run out, a piece of the next larger size
    is broken up; if there is none, smaller pieces are used instead. So an allocation fails only when fewer
    tokens are free than requested. O(pieces) per call. Thread-safe.

    Saves stage the blocks of a sequence in its extents. No engine keeps its KV in one: attention kernels
    would have to read extents of several sizes; `benchmarks/granularity.py` measures what that would gain.
    """

    def __init__(self, config: KVPoolConfig) -> None:
        self.config = config
        self._lock = Lock()
        sizes = [config.total_tokens, *(config.size_of(level) for level in LEVELS)]
        self._size_classes = {
            level: SizeClass(size, larger)
            for level, larger, size in zip(LEVELS, sizes[:-1], sizes[1:], strict=True)
        }
        self._size_classes["sequence"].break_up(0)
        self._held: set[Extent] = set()
        self._free_tokens = config.total_tokens
        self._num_fallbacks = 0

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._free_tokens:,} of {self.config.total_tokens:,} tokens free>"

    def allocate(self, num_tokens: int) -> list[Extent]:
        """Return pieces for exactly this many tokens, or take nothing.

        Raises BlockError for a number below one, OutOfBlocksError when fewer tokens are free.
        """
        if type(num_tokens) is not int or num_tokens < 1:
            raise BlockError(f"{num_tokens!r} tokens asked for; ask for an int of at least 1")
        with self._lock:
            if num_tokens > self._free_tokens:
                raise OutOfBlocksError(
                    f"{num_tokens} tokens asked for, {self._free_tokens} of {self.config.total_tokens} are "
                    "free; free some, or make the pool larger",
                    needed=num_tokens,
                    available=self._free_tokens,
                )
            extents: list[Extent] = []
            left = num_tokens
            for level, granularity in enumerate(LEVELS):
                size = self.config.size_of(granularity)
                while left >= size and (start := self._take(level)) is not None:
                    extents.append(Extent(granularity, start))
                    left -= size
                self._num_fallbacks += left >= size
            assert not left, "tokens were counted as free that are not"
            self._held.update(extents)
            self._free_tokens -= num_tokens
            return extents

    def free(self, extents: Sequence[Extent]) -> None:
        """Free all of these pieces, or none. Raises BlockError for one not held, or given twice."""
        given = list(extents)
        with self._lock:
            wrong = [extent for extent in given if not _is_in(extent, self._held)]
            if wrong:
                raise BlockError(f"{wrong[0]!r} is not allocated; free what `allocate` returned, once")
            if len(set(given)) < len(given):
                raise BlockError("an extent is given twice; free what `allocate` returned, once")
            self._held.difference_update(given)
            for extent in given:
                self._free_tokens += self.config.size_of(extent.granularity)
                self._give_back(LEVELS.index(extent.granularity), extent.start)

    def compact(self) -> list[tuple[Extent, Extent]]:
        """Move pieces so that all free tokens but less than one sequence piece form one run.

        Returns moves (from, to). The caller copies the stored data in this order and puts the new pieces in
        its tables before anybody calls the pool again: the old ones are no longer allocated.
        O(n log n) in the number of pieces.
        """
        with self._lock:
            moves = pack(self._held, self.config)
            if moves:
                for source, target in moves:
                    self._held.remove(source)
                    self._held.add(target)
                self._rebuild_size_classes()
            return moves

    def get_free_tokens(self) -> int:
        """Return how many tokens are free."""
        with self._lock:
            return self._free_tokens

    def metrics(self) -> MultiGranularMetrics:
        """Return the present state. O(free pieces)."""
        with self._lock:
            counts = dict.fromkeys(LEVELS, 0)
            for extent in self._held:
                counts[extent.granularity] += 1
            return MultiGranularMetrics(
                total_tokens=self.config.total_tokens,
                free_tokens=self._free_tokens,
                largest_free_run=_largest_run(self._free_pieces()),
                num_extents=counts,
                whole_tokens=len(self._size_classes["sequence"].starts()) * self.config.sequence_tokens,
                num_fallbacks=self._num_fallbacks,
            )

    def check_integrity(self) -> None:
        """Raise AssertionError if a token is held twice, lost, or free in two sizes. O(pieces)."""
        with self._lock:
            pieces = [(extent.start, self.config.size_of(extent.granularity)) for extent in self._held]
            num_held = sum(size for _, size in pieces)
            pieces += self._free_pieces()
            position = 0
            for start, size in sorted(pieces):
                assert start == position, f"tokens {position} to {start} are lost or given twice"
                position = start + size
            assert position == self.config.total_tokens, "the pieces do not cover the pool"
            assert num_held + self._free_tokens == self.config.total_tokens, "free tokens are counted wrong"

    def _take(self, level: int) -> int | None:
        """Return a piece of a size, breaking up a larger one if necessary."""
        size_class = self._size_classes[LEVELS[level]]
        start = size_class.take()
        if start is None and level:
            larger = self._take(level - 1)
            if larger is not None:
                size_class.break_up(larger)
                start = size_class.take()
        return start

    def _free_pieces(self) -> list[tuple[int, int]]:
        """Return start and size of each free piece."""
        return [(start, each.size) for each in self._size_classes.values() for start in each.starts()]

    def _rebuild_size_classes(self) -> None:
        """Recompute the free pieces of every size from the held ones; at least one piece is held."""
        broken = {0}
        for level, granularity in enumerate(LEVELS):
            size_class = self._size_classes[granularity]
            size, parent_size = size_class.size, size_class.parent_size
            inside = LEVELS[level:]
            used = {start - start % size for inner, start in self._held if inner in inside}
            self._size_classes[granularity] = size_class = SizeClass(size, parent_size)
            for parent in sorted(broken):
                for start in reversed(range(parent, parent + parent_size, size)):
                    if start not in used:
                        size_class.add(start)
            broken = used - {start for inner, start in self._held if inner == granularity}

    def _give_back(self, level: int, start: int) -> None:
        size_class = self._size_classes[LEVELS[level]]
        whole = size_class.add(start)
        if whole is not None:
            if level:
                self._give_back(level - 1, whole)
            else:
                size_class.break_up(whole)


def _largest_run(pieces: list[tuple[int, int]]) -> int:
    """Return the most contiguous tokens among pieces of (start, size)."""
    largest = run = end = 0
    for start, size in sorted(pieces):
        run = run + size if start == end else size
        end = start + size
        largest = max(largest, run)
    return largest


def _is_in(extent: object, held: set[Extent]) -> bool:
    try:
        return extent in held and isinstance(extent, Extent)
    except TypeError:
        return False
