"""How fast a device returns blocks, as measured."""

from __future__ import annotations

_WEIGHT = 0.2
"""The weight of the newest measurement."""


class TransferRate:
    """Nanoseconds per byte: a moving average over transfers of any size."""

    def __init__(self, bytes_per_s: float) -> None:
        self._ns_a_byte = 1e9 / bytes_per_s
        self.num_measured = 0

    @property
    def bytes_per_s(self) -> float:
        """The current estimate."""
        return 1e9 / self._ns_a_byte

    def measure(self, num_bytes: int, duration_ns: int) -> None:
        """Record a transfer. The first one replaces the guess."""
        if num_bytes < 1 or duration_ns < 1:
            return
        weight = _WEIGHT if self.num_measured else 1.0
        self._ns_a_byte += weight * (duration_ns / num_bytes - self._ns_a_byte)
        self.num_measured += 1

    def cost_ns(self, num_bytes: int) -> int:
        """Estimate a transfer."""
        return round(num_bytes * self._ns_a_byte)


def is_logged(count: int) -> bool:
    """Say whether to log the count-th error of a kind: the first, second, fourth, eighth and so on."""
    return count & (count - 1) == 0
