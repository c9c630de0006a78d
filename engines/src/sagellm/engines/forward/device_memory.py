"""Memory of a device: how much is left, and zeroed memory for KV."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sagellm.accel.native.memory import zeroed_pages
from sagellm.comm import read_memory
from sagellm.core import KVLayout, OutOfMemoryError
from sagellm.engines.loading.device_and_dtype import device_type
from sagellm.engines.sizes import format_bytes

if TYPE_CHECKING:
    import torch


def available_memory_bytes(device: str | torch.device) -> int | None:
    """Return the bytes that can still be allocated, or None if unknown.

    On a CPU that is the smaller of what the kernel calls available and what this process's
    control groups have left.
    """
    if device_type(device) == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    memory = read_memory()
    return memory.available_bytes if memory.total_bytes else None


def check_room(layouts: Sequence[KVLayout], num_blocks: Sequence[int], device: str | torch.device) -> None:
    """Raise OutOfMemoryError, before memory is touched, if so many blocks of each KV group cannot fit."""
    groups = list(zip(num_blocks, (layout.block_bytes for layout in layouts), strict=True))
    needed, available = sum(number * size for number, size in groups), available_memory_bytes(device)
    if available is not None and needed > available:
        blocks = " and ".join(f"{number} blocks of {format_bytes(size)}" for number, size in groups)
        raise OutOfMemoryError(
            f"KV of {blocks} needs {format_bytes(needed)}; {format_bytes(available)} are available on "
            f"{device}; lower kv.num_blocks (at most {available // sum(size for _, size in groups)} fit)"
        )


def zeroed(num_items: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a flat tensor of zeros. KV that was never written must not hold infinities.

    On a CPU it is reserved at once but allocated when touched, so that an engine with room for gigabytes
    starts immediately. Raises OSError, RuntimeError or MemoryError if it is refused.
    """
    import torch

    if device.type != "cpu" or num_items == 0 or sys.platform == "win32":
        return torch.zeros(num_items, dtype=dtype, device=device)
    return torch.from_numpy(zeroed_pages(num_items * dtype.itemsize)).view(dtype)
