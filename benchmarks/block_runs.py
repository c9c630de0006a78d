"""What do long runs of blocks bring to whoever reads KV?

`python benchmarks/block_runs.py`: KV of the Qwen3-0.6B shape (28 layers, 8 KV heads of 128, bf16, blocks of
16), block-major; a sequence of 2,048 tokens lies in one run, in runs of 4 blocks, or in scattered blocks.
Timed is the copy of the whole sequence and of one of its layers, by one thread, by `index_select` over all
blocks and run by run.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from common import report, spread

from sagellm.core import KVGroup, KVLayout

NUM_TOKENS = 2048
LAYOUT = KVLayout(group=KVGroup(layer_ids=tuple(range(28)), num_kv_heads=8, head_dim=128), block_size=16)


def runs_of(block_ids: Sequence[int]) -> list[tuple[int, int]]:
    """Cut a block table into runs [start, stop) of ids that follow each other."""
    cuts = [i for i, (before, after) in enumerate(pairwise(block_ids), 1) if after != before + 1]
    return [(block_ids[i], block_ids[j - 1] + 1) for i, j in pairwise([0, *cuts, len(block_ids)])]


def tables(num_blocks: int, length: int) -> dict[str, list[int]]:
    """Block tables of one length, in one run, in runs of four and in single blocks."""
    rng = random.Random(0)
    fours = rng.sample(range(0, num_blocks, 8), length // 4)  # no two of them touch
    return {
        "one run": list(range(length)),
        "runs of 4": [start + i for start in fours for i in range(4)],
        "single blocks": rng.sample(range(0, num_blocks, 2), length),
    }


def timed_ms(copy: Callable[[], object], device: torch.device, repeats: int) -> dict[str, Any]:
    """Time a copy, the first two apart."""
    values = []
    for _ in range(repeats + 2):
        _wait(device)
        begin_ns = time.perf_counter_ns()
        copy()
        _wait(device)
        values.append((time.perf_counter_ns() - begin_ns) / 1e6)
    return spread(values[2:], digits=3)


def measure_reading(device_name: str = "cpu", repeats: int = 15) -> list[dict[str, Any]]:
    """Return a row for each table: how long the copies take, in ms, with one thread of torch."""
    torch.set_num_threads(1)  # more would wait for each other wherever another process has the core
    device = torch.device(device_name)
    length = NUM_TOKENS // LAYOUT.block_size
    num_blocks = 4 * length
    group = LAYOUT.group
    shape = (num_blocks, group.num_layers, 2 * group.num_kv_heads, LAYOUT.block_size, group.head_dim)
    kv = torch.ones(shape, dtype=torch.bfloat16, device=device)  # (blocks, layers, 2 * heads, tokens, dim)
    rows = []
    for name, block_ids in tables(num_blocks, length).items():
        runs = runs_of(block_ids)
        index = torch.tensor(block_ids, device=device)
        row: dict[str, Any] = {"table": name, "num_runs": len(runs)}
        for part, source in (("sequence", kv.flatten(1)), ("layer", kv[:, group.num_layers // 2].flatten(1))):
            out = torch.empty((length, source.shape[1]), dtype=kv.dtype, device=device)
            row[f"{part}_index_select_ms"] = timed_ms(
                lambda source=source, index=index, out=out: torch.index_select(source, 0, index, out=out),
                device,
                repeats,
            )
            row[f"{part}_by_runs_ms"] = timed_ms(
                lambda source=source, runs=runs, out=out: _copy_runs(source, runs, out), device, repeats
            )
        rows.append(row)
    return rows


def _copy_runs(source: torch.Tensor, runs: list[tuple[int, int]], out: torch.Tensor) -> None:
    at = 0
    for start, stop in runs:
        out[at : at + stop - start].copy_(source[start:stop])
        at += stop - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    options = parser.parse_args()
    report(
        "block_runs",
        device=options.device,
        num_tokens=NUM_TOKENS,
        block_bytes=LAYOUT.block_bytes,
        rows=measure_reading(options.device),
    )


if __name__ == "__main__":
    main()
