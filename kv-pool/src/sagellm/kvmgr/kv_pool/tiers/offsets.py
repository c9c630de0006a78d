"""Allocates ranges of a device by offset, and merges freed ranges."""

from __future__ import annotations

from collections.abc import Iterable

from sagellm.core.errors import BlockError, ConfigError, OutOfMemoryError

_MAX_TRIES = 8
"""Free ranges of one size class to examine before trying a larger class."""


class OffsetAllocator:
    """Ranges of bytes within `[0, total_bytes)`, in whole units of `alignment` bytes.

    Free ranges are grouped by power of two and merged with their neighbours at once, so that
    no two are adjacent. A size is taken from the first range of its class that is large enough, among
    eight, or else from the smallest larger class: O(1), after M. Masmano et al., "TLSF: a new dynamic memory
    allocator for real-time systems" (2004), without its second level.
    """

    def __init__(self, total_bytes: int, alignment: int = 64) -> None:
        for name, value, least in (("total_bytes", total_bytes, 0), ("alignment", alignment, 1)):
            if type(value) is not int or value < least:
                raise ConfigError(f"{name} is {value!r}; it must be an int of at least {least}")
        self.alignment = alignment
        self.total_bytes = total_bytes - total_bytes % alignment
        self.free_bytes = self.total_bytes
        self._sizes: dict[int, int] = {}  # allocated, by offset
        self._free: dict[int, int] = {}  # sizes of free ranges, by offset
        self._free_ends: dict[int, int] = {}  # their offsets, by end
        self._classes: list[dict[int, None]] = [{} for _ in range(self.total_bytes.bit_length() + 1)]
        if self.total_bytes:
            self._add_free(0, self.total_bytes)

    def __len__(self) -> int:
        return len(self._sizes)

    def allocate(self, size: int) -> int:
        """Allocate at least `size` bytes and return the offset.

        Raises BlockError for a size below one, OutOfMemoryError if no free range is large enough.
        """
        if type(size) is not int or size < 1:
            raise BlockError(f"{size!r} bytes asked for; ask for an int of at least 1")
        needed = -(-size // self.alignment) * self.alignment
        offset = self._find(needed)
        if offset is None:
            raise OutOfMemoryError(
                f"{size} bytes asked for; {self.free_bytes} of {self.total_bytes} are free, "
                f"{self.largest_free_bytes} in one piece"
            )
        available = self._remove_free(offset)
        if available > needed:
            self._add_free(offset + needed, available - needed)
        self._sizes[offset] = needed
        self.free_bytes -= needed
        return offset

    def deallocate(self, offset: int) -> None:
        """Free a range. Raises BlockError for an offset that is not allocated."""
        size = self._sizes.pop(offset, None) if type(offset) is int else None
        if size is None:
            raise BlockError(f"nothing is allocated at offset {offset!r}; it was freed before or never given")
        self.free_bytes += size
        end = offset + size
        if end in self._free:
            size += self._remove_free(end)
        before = self._free_ends.get(offset)
        if before is not None:
            size += self._remove_free(before)
            offset = before
        self._add_free(offset, size)

    def restore(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Start over with these (offset, size) allocated, which must ascend and not overlap.

        Otherwise, or if one lies outside, raises BlockError and leaves the allocator empty.
        """
        self._sizes, self._free, self._free_ends = {}, {}, {}
        for free_ranges in self._classes:
            free_ranges.clear()
        position = 0
        for offset, size in ranges:
            size = -(-size // self.alignment) * self.alignment
            if offset < position or offset % self.alignment or offset + size > self.total_bytes:
                self.restore(())
                raise BlockError(f"{size} bytes at offset {offset} overlap others or lie outside")
            if offset > position:
                self._add_free(position, offset - position)
            self._sizes[offset] = size
            position = offset + size
        if position < self.total_bytes:
            self._add_free(position, self.total_bytes - position)
        self.free_bytes = sum(self._free.values())

    @property
    def largest_free_bytes(self) -> int:
        """The size of the largest free range."""
        for ranges in reversed(self._classes):
            if ranges:
                return max(self._free[offset] for offset in ranges)
        return 0

    def size_of(self, offset: int) -> int:
        """Return how many bytes are allocated at an offset. Raises KeyError."""
        return self._sizes[offset]

    def offsets(self) -> list[int]:
        """Return the offsets of all allocated ranges, in ascending order."""
        return sorted(self._sizes)

    def check_integrity(self) -> None:
        """Raise AssertionError if ranges overlap or are lost, or free ones are adjacent. O(n log n)."""
        ranges = sorted(
            [(offset, size, True) for offset, size in self._free.items()]
            + [(offset, size, False) for offset, size in self._sizes.items()]
        )
        position, was_free = 0, False
        for offset, size, is_free in ranges:
            assert offset == position, f"bytes {position} to {offset} are lost or given twice"
            assert not (is_free and was_free), f"two free ranges meet at {offset}"
            position, was_free = offset + size, is_free
        assert position == self.total_bytes, f"the last range ends at {position} of {self.total_bytes}"
        assert sum(self._free.values()) == self.free_bytes, "free bytes are counted wrong"
        assert {offset + size: offset for offset, size in self._free.items()} == self._free_ends
        assert sum(map(len, self._classes)) == len(self._free), "a free range is in no class, or in two"

    def _find(self, needed: int) -> int | None:
        own = needed.bit_length()
        if own >= len(self._classes):
            return None
        for tried, offset in enumerate(self._classes[own]):
            if tried == _MAX_TRIES:
                break
            if self._free[offset] >= needed:
                return offset
        for ranges in self._classes[own + 1 :]:
            if ranges:
                return next(iter(ranges))
        return next((offset for offset in self._classes[own] if self._free[offset] >= needed), None)

    def _add_free(self, offset: int, size: int) -> None:
        self._free[offset] = size
        self._free_ends[offset + size] = offset
        self._classes[size.bit_length()][offset] = None

    def _remove_free(self, offset: int) -> int:
        size = self._free.pop(offset)
        del self._free_ends[offset + size]
        del self._classes[size.bit_length()][offset]
        return size
