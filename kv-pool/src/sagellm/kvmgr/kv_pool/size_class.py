"""A size class: the free pieces of one size in a pool that has several."""

from __future__ import annotations


class SizeClass:
    """Free pieces of one size, by the larger piece that they are parts of.

    Pieces are taken from a parent that is in use already, and a parent all of whose parts came back is
    whole again: so larger pieces stay whole.
    """

    def __init__(self, size: int, parent_size: int) -> None:
        self.size, self.parent_size = size, parent_size
        self.num_parts = parent_size // size
        self.num_free = 0
        self._free: dict[int, list[int]] = {}  # by the start of the parent
        self._is_free: set[int] = set()

    def take(self) -> int | None:
        """Return the start of a piece of a parent that is broken already."""
        if not self._free:
            return None
        parent = next(iter(self._free))
        parts = self._free[parent]
        start = parts.pop()
        self._is_free.discard(start)
        self.num_free -= 1
        if not parts:
            del self._free[parent]
        return start

    def add(self, start: int) -> int | None:
        """Take a piece back; return the start of its parent if that is whole again, and forget its parts."""
        parent = start - start % self.parent_size
        parts = self._free.setdefault(parent, [])
        parts.append(start)
        self._is_free.add(start)
        self.num_free += 1
        if len(parts) < self.num_parts:
            return None
        del self._free[parent]
        self._is_free.difference_update(parts)
        self.num_free -= self.num_parts
        return parent

    def break_up(self, parent: int) -> None:
        """Make parts of a whole parent, the first to be taken first."""
        starts = range(parent, parent + self.parent_size, self.size)
        self._free[parent] = list(reversed(starts))
        self._is_free.update(starts)
        self.num_free += self.num_parts

    def starts(self) -> set[int]:
        """Return the free pieces."""
        return set(self._is_free)
