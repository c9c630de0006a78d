"""How much memory is left, on a device or on this machine."""

from __future__ import annotations

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
