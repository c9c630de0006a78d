"""How lists of numbers are printed."""

from __future__ import annotations

from collections.abc import Iterable


def ranges(numbers: Iterable[int]) -> list[str]:
    """Write neighbours as ranges: 3 4 5 9 becomes 3-5 9."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1] = found[-1][0], number
        else:
            found.append((number, number))
    return [f"{first}-{last}" if last > first else str(first) for first, last in found]
