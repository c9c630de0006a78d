"""What the host does to give a step of decodes to a device: microseconds, and bytes copied.

    python benchmarks/step_inputs.py [--sequences 256] [--blocks 2048]

Block tables that stay on the device and follow their changes, beside tables that are built for each step. The
CPU stands in for the device, and one block of each sequence is gathered there, so that next to nothing but
the host's part is measured, without pinned memory. One sequence in 16 gets a block in
a step, as with blocks of 16 tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from sagellm.core.protocols.step import BlockUpdates
from sagellm.engines.worker.device_inputs import DeviceInputs

DEVICE = torch.device("cpu")
REPEATS = 200


def built(arrays: list[np.ndarray], tables: np.ndarray, seats: np.ndarray, width: int) -> int:
    """Copy everything, as before tables stayed there; return how many bytes."""
    last = np.full(len(seats), width - 1)
    rows = tables[0][seats, :width].astype(np.int64)
    is_left = np.arange(width) > last[:, None]
    if np.count_nonzero(is_left):
        rows[is_left] = 0
    for each in (*arrays, rows):
        torch.from_numpy(each).to(DEVICE, non_blocking=True)
    return rows.nbytes + sum(each.nbytes for each in arrays)


def measured(step: Callable[[], object]) -> str:
    """Return the least and median time of a step."""
    times_us = []
    for _ in range(REPEATS):
        begin_ns = time.perf_counter_ns()
        step()
        times_us.append((time.perf_counter_ns() - begin_ns) / 1000)
    return f"{min(times_us):8.0f} us least {statistics.median(times_us):8.0f} us median"


def main() -> None:
    """Measure both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=2048)
    options = parser.parse_args()
    tables = np.zeros((1, options.sequences, options.blocks), np.int32)
    seats = np.arange(options.sequences, dtype=np.int32)
    arrays = [seats.astype(np.int64)] * 4  # tokens, positions, slots, wanted
    num_bytes = built(arrays, tables, seats, options.blocks)
    print(
        f"built for each step    {measured(lambda: built(arrays, tables, seats, options.blocks))}", num_bytes
    )

    inputs, some = DeviceInputs(DEVICE), seats[::16]
    zeros = np.zeros_like(some)
    updates = BlockUpdates(zeros, some, zeros + options.blocks - 1, some)

    def step() -> None:
        inputs.note_blocks(updates)
        inputs.take(arrays, tables, seats, 1)

    step()
    num_bytes = sum(each.nbytes for each in arrays) + 8 * (len(seats) + 2 * len(some))
    print(f"kept on the device     {measured(step)}", num_bytes)


if __name__ == "__main__":
    main()
