"""What does it cost to compact the KV pool under load, and what do runs of blocks bring?

`python benchmarks/compaction.py MODEL [--json]`: requests decode in a pool in which every other block is
free and the rest is in use by others. The same load runs without and with compaction between its steps, in
turn: inter-token latency (ITL) of both, external fragmentation before and after, the time that it took, and
whether the greedy tokens are equal. Then copies, xxh3 checksums and file writes and reads of 128 blocks of
the same layout, scattered, in runs of 4 and in one run. MODEL is a directory, such as
`benchmarks/make_model.py` makes.

External fragmentation = 1 - largest free run ÷ free blocks. ITL is the gap between two tokens of a request.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import xxhash
from block_runs import runs_of
from common import foreign_cores, output_flags, publish, spread

from sagellm.core import BlockAllocationRequest, BlockId, KVLayout, SequenceId
from sagellm.engines import LLMEngine, SamplingParams
from sagellm.engines.cli.output import columns
from sagellm.engines.engine_core.kv_cache_manager import replace_blocks
from sagellm.server.remote.operations import core_operations

GIB = 1 << 30


@dataclass
class Load:
    """One run of the load: when each token came, which it was, and what compaction did."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    itl_ms: list[float] = field(default_factory=list)
    compaction: dict[str, Any] = field(default_factory=dict)


class Others:
    """Holds every other block of an engine's pool, wherever compaction moves them, until it is left."""

    def __init__(self, engine: LLMEngine) -> None:
        self._kv = engine.client.core.kv  # type: ignore[attr-defined]
        self._move = self._kv.move_blocks
        pool = self._kv._pool
        request = BlockAllocationRequest(num_blocks=pool.get_free_blocks(), sequence_id=SequenceId("others"))
        block_ids = sorted(pool.allocate(request))
        pool.free(block_ids[::2])
        self.block_ids = block_ids[1::2]

    def __enter__(self) -> None:
        self._kv.move_blocks = self._follow

    def __exit__(self, *_: object) -> None:
        self._kv.move_blocks = self._move
        self._kv._pool.free(self.block_ids)
        self._kv.clear_cache()
        self._kv.check_integrity()

    def _follow(self, moves: Sequence[tuple[BlockId, BlockId]]) -> None:
        self._move(moves)
        replace_blocks([self.block_ids], moves)


class Compaction:
    """Moves blocks before the steps of an engine, from one step on until there is no more to be moved."""

    def __init__(self, engine: LLMEngine, first_step: int) -> None:
        self._engine = engine
        self._compact = core_operations(engine.client.core)["pool_compact"]  # type: ignore[attr-defined]
        self._num_steps_to_wait = first_step
        self._slices: list[dict[str, Any]] = []
        self._began = 0.0
        self.figures: dict[str, Any] = {"is_complete": False}

    def advance(self) -> None:
        """Move some, if it is time."""
        self._num_steps_to_wait -= 1
        if self._num_steps_to_wait >= 0 or self.figures["is_complete"]:
            return
        if not self._slices:
            self.figures["external_fragmentation_before"] = self._fragmentation()
            self._began = time.perf_counter()
        done = self._compact()
        if done["num_moved_blocks"]:
            self._slices.append(done)
            return
        self.figures["is_complete"] = True
        self.figures["duration_s"] = round(time.perf_counter() - self._began, 3)
        self.figures["external_fragmentation_after"] = self._fragmentation()

    def sum_up(self) -> dict[str, Any]:
        """Return what was done, also where the load ended first."""
        moving_ms = [1000 * each["moving_s"] for each in self._slices]
        return self.figures | {
            "num_moved_blocks": sum(each["num_moved_blocks"] for each in self._slices),
            "num_steps": len(self._slices),
            "moving_ms": round(sum(moving_ms), 2),
            "slice_ms": spread(moving_ms, digits=2) if moving_ms else None,
        }

    def _fragmentation(self) -> float:
        return round(self._engine.metrics().modules["kv_pool"].external_fragmentation, 4)


def run_load(engine: LLMEngine, options: argparse.Namespace, compaction: Compaction | None = None) -> Load:
    """Decode all requests to their end in a fragmented pool."""
    rng = random.Random(0)
    params = SamplingParams(temperature=0.0, max_tokens=options.tokens, ignore_eos=True)
    load, times = Load(), dict[str, list[float]]()
    with Others(engine):
        for number in range(options.requests):
            prompt = [rng.randrange(5, options.vocabulary) for _ in range(options.prompt)]
            engine.add_request(prompt, params, request_id=str(number))
        while engine.has_unfinished_requests():
            if compaction is not None:
                compaction.advance()
            outputs = engine.step()
            now = time.perf_counter()
            for output in outputs:
                times.setdefault(output.request_id, []).append(now)
                load.tokens[output.request_id] = list(output.outputs[0].token_ids)
    load.itl_ms = [1000 * (after - before) for each in times.values() for before, after in pairwise(each)]
    if compaction is not None:
        load.compaction = compaction.sum_up()
    return load


def measure_load(options: argparse.Namespace) -> dict[str, Any]:
    """Run the load without and with compaction, in turn, and compare."""
    engine = LLMEngine(
        model=options.model,
        num_blocks=options.num_blocks,
        max_num_seqs=options.requests,
        max_num_batched_tokens=2048,
        kv_allocator=options.allocator,
    )
    core = engine.client.core  # type: ignore[attr-defined]
    # What is first written to is slow, and blocks that were in use before compaction are not.
    core.steps.copy_blocks([(0, block_id) for block_id in range(1, options.num_blocks)])
    run_load(engine, argparse.Namespace(**{**vars(options), "tokens": 4}))  # warm-up
    loads: dict[bool, list[Load]] = {False: [], True: []}
    for _ in range(options.rounds):
        loads[False].append(run_load(engine, options))
        loads[True].append(run_load(engine, options, Compaction(engine, options.tokens // 4)))
    itl = {
        compacts: spread([ms for load in each for ms in load.itl_ms], digits=2)
        for compacts, each in loads.items()
    }
    return {
        "num_requests": options.requests,
        "num_blocks": options.num_blocks,
        "block_bytes": engine.layout.block_bytes,
        "itl_ms_without": itl[False],
        "itl_ms_with": itl[True],
        "itl_p99_ratio": round(itl[True]["p99"] / itl[False]["p99"], 3),
        "is_token_exact": len({str(sorted(load.tokens.items())) for each in loads.values() for load in each})
        == 1,
        "compactions": [load.compaction for load in loads[True]],
    }


def measure_rates(layout: KVLayout, repeats: int, folder: str | None) -> list[dict[str, Any]]:
    """Return GiB/s of what is done with 128 blocks that lie scattered, in runs of 4, and in one run."""
    length, num_bytes = 128, layout.block_bytes
    kv = torch.randint(0, 255, (4 * length, num_bytes), dtype=torch.uint8)
    view = memoryview(kv.numpy()).cast("B")
    rng = random.Random(0)
    fours = rng.sample(range(0, 4 * length, 8), length // 4)
    tables = {
        "scattered": rng.sample(range(0, 4 * length, 2), length),
        "runs of 4": [start + i for start in fours for i in range(4)],
        "one run": list(range(length)),
    }
    out = torch.empty((length, num_bytes), dtype=torch.uint8)
    rows = []
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        for name, block_ids in tables.items():
            runs = [(start * num_bytes, stop * num_bytes) for start, stop in runs_of(block_ids)]
            reader = Reader(view, memoryview(out.numpy()).cast("B"), runs, file.fileno())
            actions = (reader.copy, reader.xxh3, reader.write, reader.read, reader.read_cold)
            rates = {f"{act.__name__}_gib_per_s": _rate(act, length * num_bytes, repeats) for act in actions}
            rows.append({"blocks": name, "num_runs": len(runs), **rates})
    return rows


@dataclass
class Reader:
    """What is done with one run of bytes after the other; a file has them in order and without gaps."""

    kv: memoryview
    out: memoryview
    runs: list[tuple[int, int]]
    file: int

    def copy(self) -> None:
        """Gather them in memory."""
        at = 0
        for start, stop in self.runs:
            self.out[at : at + stop - start] = self.kv[start:stop]
            at += stop - start

    def xxh3(self) -> None:
        """Take a checksum of each run."""
        for start, stop in self.runs:
            xxhash.xxh3_64_intdigest(self.kv[start:stop])

    def write(self) -> None:
        """Write them to the file, and wait for the device."""
        at = 0
        for start, stop in self.runs:
            while start < stop:
                done = os.pwrite(self.file, self.kv[start:stop], at)
                start, at = start + done, at + done
        os.fdatasync(self.file)

    def read(self) -> None:
        """Read them from the system's memory of the file."""
        at = 0
        for start, stop in self.runs:
            while start < stop:
                done = os.preadv(self.file, [self.kv[start:stop]], at)
                start, at = start + done, at + done

    def read_cold(self) -> None:
        """Read them after the system was told to forget the file."""
        os.posix_fadvise(self.file, 0, 0, os.POSIX_FADV_DONTNEED)
        self.read()


def _rate(act: Callable[[], None], num_bytes: int, repeats: int) -> float:
    """Return the best rate of several, the first apart."""
    seconds = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - begin)
    return round(num_bytes / GIB / min(seconds[1:]), 2)


def table(figures: dict[str, Any]) -> str:
    """Write the figures for people."""
    load = figures["load"]
    rows = [
        (name, *(f"{load[f'itl_ms_{name}'][each]:g}" for each in ("min", "median", "p99")))
        for name in ("without", "with")
    ]
    lines = [
        columns(("COMPACTION", "ITL MIN MS", "MEDIAN", "P99"), rows),
        f"p99 ratio {load['itl_p99_ratio']}; token-exact: {load['is_token_exact']}",
        *(str(each) for each in load["compactions"]),
    ]
    rates = figures["rates"]
    head = [name.replace("_gib_per_s", "").upper() for name in rates[0]]
    return "\n".join(
        [*lines, "", "GiB/s, best", columns(head, [tuple(map(str, row.values())) for row in rates])]
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--num-blocks", type=int, default=512)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--vocabulary", type=int, default=5000, help="prompts are of token ids below")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--allocator", default="free_list")
    parser.add_argument("--repeats", type=int, default=3, help="of each rate")
    parser.add_argument("--folder", help="where the file of the rates is. [default: the system's]")
    output_flags(parser, "compaction")
    options = parser.parse_args()
    foreign = foreign_cores()
    load = measure_load(options)
    layout = LLMEngine(model=options.model, num_blocks=1).layout
    figures = {"load": load, "rates": measure_rates(layout, options.repeats, options.folder)}
    publish("compaction", table(figures), options, foreign_cores=foreign, **figures)


if __name__ == "__main__":
    main()
