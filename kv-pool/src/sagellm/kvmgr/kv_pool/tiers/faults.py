"""Which faults of a tier are worth a line in the log."""

from __future__ import annotations


def is_logged(count: int) -> bool:
    """Say whether the count-th fault of a kind is: the first, second, fourth, eighth and so on."""
    return count & (count - 1) == 0
