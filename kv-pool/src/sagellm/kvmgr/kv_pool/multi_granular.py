"""One pool that hands out KV in pieces of three sizes: tokens, pages, sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

from sagellm.core.errors import BlockError, OutOfBlocksError
from sagellm.core.metrics.cache import external_fragmentation
from sagellm.kvmgr.kv_pool.extents import LEVELS, Extent, Granularity, KVPoolConfig
from sagellm.kvmgr.kv_pool.packing import pack
from sagellm.kvmgr.kv_pool.size_class import SizeClass


@dataclass(frozen=True, kw_only=True)
class MultiGranularMetrics:
    """The state of a pool, in tokens; `num_extents` by size."""

    total_tokens: int
    free_tokens: int
    num_extents: dict[Granularity, int]
    largest_free_run: int  # tokens
    whole_tokens: int  # free, in whole sequence pieces
    num_fallbacks: int  # sequence pieces that had to be made of pages, and pages of tokens

    @property
    def external_fragmentation(self) -> float:
        """1 - largest free run ÷ free tokens; 0 when nothing is free."""
        return external_fragmentation(self.largest_free_run, self.free_tokens)

    @property
    def broken_share(self) -> float:
        """1 - tokens in whole free sequence pieces ÷ free tokens; 0 when nothing is free."""
        return 1 - self.whole_tokens / self.free_tokens if self.free_tokens else 0.0


class MultiGranularKVPool:
    """Gives a sequence whole sequence pieces, then pages, then single tokens, so that nothing is left over.

    `allocate(num_tokens)` covers the tokens exactly. A size that has run out is made of the next larger
    one, broken up; a piece whose larger size has run out is replaced by smaller ones. So an allocation fails
    only when fewer tokens are free than asked for. O(pieces) a call. Safe under concurrent calls.

    Experimental: no engine uses it yet. It is for attention kernels that read extents of several sizes;
    `benchmarks/granularity.py` measures what it would gain and cost.
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
        """Return pieces for exactly so many tokens, all of them or none.

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
        """Give pieces back, all of them or none. Raises BlockError for one not held, or given twice."""
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
        """Move pieces so that what is free lies in one run, but for less than one sequence piece.

        Returns moves (from, to). The caller copies what is stored in this order and puts the new pieces in
        its tables before anybody calls the pool again: the old ones are no longer allocated.
        O(n log n) in the pieces.
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
            free = [
                (start, size_class.size)
                for size_class in self._size_classes.values()
                for start in size_class.starts()
            ]
            counts = dict.fromkeys(LEVELS, 0)
            for extent in self._held:
                counts[extent.granularity] += 1
            return MultiGranularMetrics(
                total_tokens=self.config.total_tokens,
                free_tokens=self._free_tokens,
                largest_free_run=_largest_run(free),
                num_extents=counts,
                whole_tokens=self._size_classes["sequence"].num_free * self.config.sequence_tokens,
                num_fallbacks=self._num_fallbacks,
            )

    def check_integrity(self) -> None:
        """Raise AssertionError if a token is held twice, lost, or free in two sizes. O(pieces)."""
        with self._lock:
            pieces = [(extent.start, self.config.size_of(extent.granularity)) for extent in self._held]
            num_held = sum(size for _, size in pieces)
            for granularity, size_class in self._size_classes.items():
                starts = size_class.starts()
                assert len(starts) == size_class.num_free, f"free {granularity} pieces are counted wrong"
                pieces += [(start, size_class.size) for start in starts]
            position = 0
            for start, size in sorted(pieces):
                assert start == position, f"tokens {position} to {start} are lost or given twice"
                position = start + size
            assert position == self.config.total_tokens, "the pieces do not cover the pool"
            assert num_held + self._free_tokens == self.config.total_tokens, "free tokens are counted wrong"

    def _take(self, level: int) -> int | None:
        """Return a piece of a size, of a larger one that is broken up if need be."""
        size_class = self._size_classes[LEVELS[level]]
        start = size_class.take()
        if start is None and level:
            larger = self._take(level - 1)
            if larger is not None:
                size_class.break_up(larger)
                start = size_class.take()
        return start

    def _rebuild_size_classes(self) -> None:
        """Find the free pieces of every size anew from what is held; something is."""
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
    """Return the most tokens that lie side by side in pieces of (start, size)."""
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
