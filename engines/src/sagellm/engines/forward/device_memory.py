"""Memory of a device: how much is left, and zeroed memory for KV."""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress

import torch

from sagellm.comm import read_memory


def available_memory_bytes(device: torch.device) -> int | None:
    """Return the bytes that can still be allocated, or None if unknown.

    On a CPU that is the smaller of what the kernel calls available and what this process's
    control groups have left.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    memory = read_memory()
    return memory.available_bytes if memory.total_bytes else None


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
