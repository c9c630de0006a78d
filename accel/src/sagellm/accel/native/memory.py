"""Large pieces of memory from the kernel."""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


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
