"""Large pieces of memory from the kernel."""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_PAGE_BYTES = 4096
_PIECE_BYTES = 2 << 20  # a huge page


def zeroed_pages(num_bytes: int) -> Bytes:
    """Return zeros in an anonymous mapping, with huge pages if the kernel has them.

    Reserved at once, and allocated page by page as it is first written. It lives as long as a view of it.
    Raises OSError or MemoryError if it is refused.
    """
    if not num_bytes:
        return np.empty(0, np.uint8)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


class AllocatedAhead:
    """Memory of `zeroed_pages` that idle time allocates ahead of its use.

    The kernel clears a page, and a virtual machine's host may have to find it first, when it is first
    written: of a new prompt's time that can be more than its attention takes. What is allocated ahead is as
    much as a recent burst of use took anew, at most `max_ahead_bytes`, and a quarter of that before the first
    burst. A burst ends when idle time begins; each one takes an eighth off the demand of those before it.
    """

    # [0, used)          written, or skipped by what is written
    # [used, allocated)  ahead

    def __init__(self, memory: Bytes, max_ahead_bytes: int) -> None:
        self._memory, self._max_ahead_bytes = memory.reshape(-1), max_ahead_bytes
        self._used_bytes = self._allocated_bytes = 0
        self._burst_start_bytes = 0
        self._demand_bytes = max_ahead_bytes // 4
        self._is_in_burst = False

    @property
    def allocated_bytes(self) -> int:
        """Bytes from the start on that have been allocated ahead."""
        return self._allocated_bytes

    def use(self, num_bytes: int) -> None:
        """Say that the first `num_bytes` are in use."""
        self._is_in_burst = True
        self._used_bytes = max(self._used_bytes, num_bytes)

    def allocate_some(self) -> bool:
        """Allocate one piece, and say whether there is more to allocate. What the memory holds stays."""
        if self._is_in_burst:
            self._end_burst()
        start = max(self._allocated_bytes, self._used_bytes // _PIECE_BYTES * _PIECE_BYTES)
        ahead_bytes = min(self._demand_bytes, self._max_ahead_bytes)
        wanted = min(self._memory.nbytes, self._used_bytes + ahead_bytes)
        if start >= wanted:
            return False
        end = min(start + _PIECE_BYTES, self._memory.nbytes)
        self._memory[start:end:_PAGE_BYTES] |= 0
        self._allocated_bytes = end
        return end < wanted

    def _end_burst(self) -> None:
        taken_bytes = self._used_bytes - self._burst_start_bytes
        self._demand_bytes = max(taken_bytes, self._demand_bytes * 7 // 8)
        self._burst_start_bytes = self._used_bytes
        self._is_in_burst = False
