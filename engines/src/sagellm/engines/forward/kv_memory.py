"""Memory for KV: zeroed, on a CPU taken page by page as blocks are first written."""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress

import torch


def zeroed(num_items: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a flat tensor of zeros. KV that was never written must not hold infinities.

    On a CPU it is an anonymous mapping, with huge pages if the kernel has them: reserved at once but
    allocated when touched, so that an engine with room for gigabytes starts immediately. Raises OSError,
    RuntimeError or MemoryError if it is refused.
    """
    if device.type != "cpu" or num_items == 0 or sys.platform == "win32":
        return torch.zeros(num_items, dtype=dtype, device=device)
    memory = mmap.mmap(-1, num_items * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)
