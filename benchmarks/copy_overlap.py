"""Does reading KV beside a step pay? `python benchmarks/copy_overlap.py MODEL`.

Blocks that a step neither reads nor writes are copied to host memory, as at their eviction to a tier: not at
all, before the step, and on a thread of their own beside it. The three take turns, so that all meet the same
load. Steps are decodes of 1 and some sequences, and a prompt of 512 tokens. `gain` is what "beside" saves,
(before - beside) ÷ before, of medians; `possible` is what it would be if the shorter of both cost nothing.

Then a run with a host tier counts, in the execution graphs of its steps, how many of the blocks that are
copied, read at eviction, or written from the tier must be there before the very next step that computes
something is over: it, or a transfer before it, writes what was read; or it touches what was written. Prompts
are computed in one step, and in chunks.
Makes MODEL, of random weights in the Qwen3-0.6B shape, if it is not there.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common import foreign_cores, output_flags, publish, spread
from make_model import ensure

from sagellm.core import BlockId
from sagellm.engines import LLMEngine, SamplingParams
from sagellm.engines.cli.output import columns
from sagellm.engines.worker.execution_graph import FORWARD_KINDS, ExecutionGraph

NUM_CONTEXT, NUM_PROMPT, WARM_STEPS = 256, 512, 3
MODES = ("without", "before", "beside")


class Reads:
    """Reads some blocks that no sequence has into buffers, over and over."""

    def __init__(self, engine: LLMEngine, num_blocks: int) -> None:
        self._backend = engine.client.core.runner.backend  # type: ignore[attr-defined]
        last = engine.config.kv.num_blocks or 0
        self._block_ids = [BlockId(each) for each in range(last - num_blocks, last)]
        block_bytes = engine.layout.block_bytes if engine.layout else 0
        self._buffers = [memoryview(np.ones(block_bytes, np.uint8)) for _ in range(num_blocks)]
        self.num_bytes = num_blocks * block_bytes

    def __call__(self) -> None:
        """Read all of them once."""
        self._backend.read_blocks(self._block_ids, self._buffers)


def timed_ms(work: Callable[[], object]) -> float:
    """Return the milliseconds that something takes."""
    begun_s = time.perf_counter()
    work()
    return (time.perf_counter() - begun_s) * 1000


def measure(
    engine: LLMEngine, reads: Reads, prepare: Callable[[], object], num_steps: int
) -> dict[str, list[float]]:
    """Return milliseconds of steps by mode; `prepare` is called before each."""
    took: dict[str, list[float]] = {mode: [] for mode in MODES}
    with ThreadPoolExecutor(1) as pool:
        pool.submit(reads).result()

        def beside() -> None:
            reading = pool.submit(reads)
            engine.step()
            reading.result()

        runs: dict[str, Callable[[], object]] = {
            "without": engine.step,
            "before": lambda: (reads(), engine.step()),
            "beside": beside,
        }
        gc.collect()
        for number in range(-WARM_STEPS, num_steps):
            for mode, run in runs.items():
                prepare()
                milliseconds = timed_ms(run)
                if number >= 0:
                    took[mode].append(milliseconds)
    return took


def rows_of(name: str, took: dict[str, list[float]], reads: Reads) -> dict[str, Any]:
    """Sum up one kind of step."""
    read_ms = [timed_ms(reads) for _ in range(9)]
    without, before, beside = (median(took[mode]) for mode in MODES)
    return {
        "step": name,
        **{f"{mode}_ms": spread(took[mode]) for mode in MODES},
        "read_ms": spread(read_ms),
        "read_gib_per_s": round(reads.num_bytes / median(read_ms) / 1e-3 / (1 << 30), 2),
        "gain": round((before - beside) / before, 3),
        "possible": round(min(median(read_ms), without) / before, 3),
    }


def overlap(model: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all kinds of steps on one engine."""
    engine = LLMEngine(
        str(model),
        dtype=options.dtype,
        forward_backend=options.backend,
        num_blocks=2 * options.streams * (NUM_CONTEXT // 16 + options.steps) + options.blocks,
        max_num_seqs=options.streams,
        max_num_batched_tokens=max(NUM_PROMPT, options.streams * NUM_CONTEXT),
        scheduler_passes="chunk=none",
        enable_prefix_caching=False,
    )
    reads, rng = Reads(engine, options.blocks), np.random.default_rng(0)
    found = []

    def add(num_tokens: int, max_tokens: int) -> None:
        prompt = rng.integers(5, 1500, num_tokens).tolist()
        engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))

    for num_streams in (1, options.streams):
        for _ in range(num_streams):
            add(NUM_CONTEXT, 3 * (options.steps + WARM_STEPS) + 8)
        while len(engine.step()) < num_streams:  # until all decode
            pass
        took = measure(engine, reads, lambda: None, options.steps)
        found.append(rows_of(f"decode of {num_streams}", took, reads))
        while engine.has_unfinished_requests():
            engine.step()
    took = measure(engine, reads, lambda: add(NUM_PROMPT, 1), max(5, options.steps // 4))
    found.append(rows_of(f"prompt of {NUM_PROMPT}", took, reads))
    engine.close()
    return found


def needed_next(max_num_batched_tokens: int) -> dict[str, dict[str, int]]:
    """Count the blocks of transfers, and those that the next computed step needs to be transferred.

    With the embedded model, as that depends on lengths alone. Prompts evict each other, share a part of a
    block, and come again.
    """
    graphs: list[ExecutionGraph] = []
    with LLMEngine(
        dtype="float32",
        num_blocks=160,
        max_num_seqs=4,
        max_num_batched_tokens=max_num_batched_tokens,
        scheduler_passes="chunk=none",
        kv_tiers={"host": "4GiB"},
        kv_fetch="always",
    ) as engine:
        engine.watch_graphs(graphs.append)
        rng = np.random.default_rng(0)
        beginning = rng.integers(5, 1500, 40).tolist()
        prompts = [[*beginning, *rng.integers(5, 1500, 160).tolist()] for _ in range(32)]
        for start in [*range(0, 32, 4), *range(0, 32, 4)]:
            params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
            engine.generate(prompts[start : start + 4], params)
    moved: dict[str, set[int]] = {kind: set() for kind in ("copy", "read", "write")}
    counts = {kind: {"num_blocks": 0, "num_needed_next": 0} for kind in moved}
    for graph in graphs:
        for node in graph.nodes:
            if node.kind in moved:
                moved[node.kind].update((node.reads if node.kind == "read" else node.writes) or ())
        if not graph.num_rows:
            continue
        computed = [node for node in graph.nodes if node.kind in FORWARD_KINDS]
        written = {each for node in computed for each in node.writes or ()}
        touched = written.union(*(node.reads or () for node in computed))
        written |= moved["copy"] | moved["write"]
        for kind, blocks in moved.items():
            counts[kind]["num_blocks"] += len(blocks)
            counts[kind]["num_needed_next"] += len(blocks & (written if kind == "read" else touched))
        for blocks in moved.values():
            blocks.clear()
    return counts


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--backend", default="auto", help="forward backend; default: %(default)s")
    parser.add_argument("--blocks", type=int, default=32, help="read each time; default: %(default)s")
    parser.add_argument("--streams", type=int, default=8, help="that decode together; default: %(default)s")
    parser.add_argument("--steps", type=int, default=40, help="of each mode; default: %(default)s")
    output_flags(parser, "copy-overlap")
    options = parser.parse_args()
    model = ensure(options.model)
    foreign = foreign_cores()
    found = overlap(model, options)
    shares = {f"at most {most} tokens a step": needed_next(most) for most in (2048, 64)}
    table = columns(
        ["step", *(f"{mode} ms" for mode in MODES), "read ms", "gain", "possible"],
        [
            [
                row["step"],
                *(f"{row[f'{mode}_ms']['median']:.2f}" for mode in MODES),
                f"{row['read_ms']['median']:.2f}",
                f"{row['gain']:+.1%}",
                f"{row['possible']:.1%}",
            ]
            for row in found
        ],
    )
    needed = "\n".join(
        f"{which}, {kind}: {count['num_needed_next']} of {count['num_blocks']} blocks are needed next"
        for which, counts in shares.items()
        for kind, count in counts.items()
    )
    publish(
        "copy_overlap",
        f"{table}\n\n{needed}",
        options,
        foreign_cores=foreign,
        dtype=options.dtype,
        backend=options.backend,
        num_blocks=options.blocks,
        steps=found,
        needed_next=shares,
    )


if __name__ == "__main__":
    main()
