"""Work on a large matrix a few rows at a time, to bound temporary memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch

CPU_SLICE_BYTES = 4 << 20  # stays in a CPU's cache between two operations
DEVICE_SLICE_BYTES = 32 << 20  # large enough that launching a kernel costs little


def row_slices(num_rows: int, bytes_per_row: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Yield `[start, stop)` ranges that cover the rows.

    A range takes at most 4 MiB on a CPU and 32 MiB on another device, or is a single row.
    """
    max_bytes = CPU_SLICE_BYTES if device.type == "cpu" else DEVICE_SLICE_BYTES
    step = max(1, max_bytes // max(1, bytes_per_row))
    for start in range(0, num_rows, step):
        yield start, min(start + step, num_rows)
