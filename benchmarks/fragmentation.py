"""How much of the KV pool is lost to fragmentation, and what an allocator can do about it.

`python benchmarks/fragmentation.py [--json]`: the production scheduler, pool and prefix cache, the forward
pass left out. Requests of 1,000 tokens on average (log-normal prompts of 600 and outputs of 400), so many
that some always wait; 10,000 blocks of 16. Each allocator runs the same load, with prefix caching (the
default) and without.

Figures are taken after each step, from the first preemption to the last arrival:
internal fragmentation = 1 - tokens stored ÷ (allocated blocks x block size),
external fragmentation = 1 - largest free run ÷ free blocks, 0 when nothing is free,
utilisation = live tokens ÷ capacity in tokens just before the step of the first preemption.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from block_runs import measure_reading, runs_of
from common import report, spread
from modelless import modelless_core

from sagellm.core import (
    BlockAllocationRequest,
    BlockId,
    PluginRegistry,
    ProviderSpec,
    Request,
    RequestId,
    SequenceId,
    pack,
)
from sagellm.engines import EngineConfig, SamplingParams
from sagellm.engines.engine_core.core import EngineCore
from sagellm.engines.engine_core.sequence import Sequence
from sagellm.engines.modules import Modules
from sagellm.engines.requests.queued_request import QueuedSequence
from sagellm.kvmgr.kv_pool import PagedKVPool

ALLOCATORS = ("free_list", "buddy")
BLOCK_SIZE = 16
LONGEST = 8192
NUM_WAITING = 32


class TimedPool(PagedKVPool):
    """The production pool, with the time of each call."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.allocate_us: list[float] = []
        self.free_us: list[float] = []

    def allocate(self, request: BlockAllocationRequest) -> list[BlockId]:
        """Note the time of a call that succeeds."""
        begin_ns = time.perf_counter_ns()
        block_ids = super().allocate(request)
        self.allocate_us.append((time.perf_counter_ns() - begin_ns) / 1000)
        return block_ids

    def free(self, block_ids: Any) -> int:
        """Note the time of the call."""
        begin_ns = time.perf_counter_ns()
        num_freed = super().free(block_ids)
        self.free_us.append((time.perf_counter_ns() - begin_ns) / 1000)
        return num_freed


class TimedModules(Modules):
    """The production modules around a pool that is timed."""

    pool: TimedPool

    def make(self, kind: str, spec: ProviderSpec | str, *args: Any, **keywords: Any) -> Any:
        """Make the timed pool in place of the other."""
        if kind != "kv_pool":
            return super().make(kind, spec, *args, **keywords)
        self.pool = TimedPool(*args, **keywords)
        return self.pool


@dataclass
class Samples:
    """What is seen after each step."""

    internal: list[float] = field(default_factory=list)
    external: list[float] = field(default_factory=list)
    num_free: list[int] = field(default_factory=list)
    run_lengths: list[float] = field(default_factory=list)
    utilisation: float = 0.0

    def take(self, pool: TimedPool, sequences: list[Sequence]) -> None:
        """Look at the pool and at the block tables of the sequences that run."""
        metrics = pool.metrics()
        held = [sequence for sequence in sequences if sequence.block_ids]
        lost = sum(len(sequence.block_ids) * BLOCK_SIZE - sequence.num_computed_tokens for sequence in held)
        self.internal.append(lost / (metrics.num_used_blocks * BLOCK_SIZE))
        self.external.append(metrics.external_fragmentation)
        self.num_free.append(metrics.num_free_blocks)
        num_runs = sum(len(runs_of(sequence.block_ids)) for sequence in held)
        self.run_lengths.append(sum(len(sequence.block_ids) for sequence in held) / num_runs)


def requests(num_requests: int, seed: int) -> Iterator[Sequence]:
    """Yield the same sequences for every allocator, no two of which begin alike."""
    rng = random.Random(seed)

    def draw(mean: float, sigma: float = 0.8) -> int:
        return max(1, min(LONGEST // 2, round(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))))

    for number in range(num_requests):
        num_prompt, num_output = draw(600), draw(400)
        asked = Request(
            request_id=RequestId(str(number)),
            token_ids=pack([rng.randrange(1 << 30) for _ in range(num_prompt)]),
            max_tokens=num_output,
            arrival_ns=number,
        )
        params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
        yield Sequence.of(QueuedSequence(SequenceId(str(number)), asked, params, 0, frozenset()))


def make_core(allocator: str, num_blocks: int, *, with_cache: bool) -> tuple[EngineCore, TimedPool]:
    """Build a core whose pool times its calls."""
    config = EngineConfig.from_flat(
        device="cpu",
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        kv_allocator=allocator,
        enable_prefix_caching=with_cache,
        max_num_seqs=1024,
        max_num_batched_tokens=LONGEST,
    )
    modules = TimedModules(PluginRegistry.load(), config)
    core = modelless_core(modules, num_blocks)
    return core, modules.pool


def run_load(
    allocator: str, num_blocks: int, num_requests: int, seed: int, *, with_cache: bool
) -> dict[str, Any]:
    """Keep a queue waiting until all requests have arrived, and say what was seen."""
    core, pool = make_core(allocator, num_blocks, with_cache=with_cache)
    arrivals = requests(num_requests, seed)
    samples = Samples()
    sequences: list[Sequence] = []
    lengths: list[int] = []
    is_arriving = True
    while is_arriving:
        while core.scheduler.num_waiting < NUM_WAITING and is_arriving:
            sequence = next(arrivals, None)
            is_arriving = sequence is not None
            if sequence is not None:
                core.add(sequence)
                sequences.append(sequence)
                lengths.append(len(sequence.request.token_ids) + sequence.request.max_tokens)
        live = core.scheduler.num_live_tokens
        core.step()
        sequences = [sequence for sequence in sequences if sequence.sequence_id in core.scheduler]
        if core.scheduler.num_preemptions:
            samples.utilisation = samples.utilisation or live / (num_blocks * BLOCK_SIZE)
            samples.take(pool, sequences)
    core.kv.check_integrity()
    return {
        "allocator": allocator,
        "prefix_cache": with_cache,
        "mean_tokens": round(statistics.mean(lengths)),
        "num_steps": len(samples.external),
        "internal_fragmentation": round(statistics.mean(samples.internal), 4),
        "external_fragmentation": round(statistics.mean(samples.external), 4),
        "share_of_steps_with_free_blocks": round(statistics.mean(map(bool, samples.num_free)), 4),
        "mean_free_blocks": round(statistics.mean(samples.num_free), 1),
        "utilisation_at_first_preemption": round(samples.utilisation, 4),
        "mean_run_blocks": round(statistics.mean(samples.run_lengths), 2),
        "preemptions": core.scheduler.num_preemptions,
        "allocate_us": spread(pool.allocate_us, digits=2),
        "free_us": spread(pool.free_us, digits=2),
    }


def time_calls(allocator: str, num_blocks: int, size: int, num_calls: int = 10_000) -> dict[str, Any]:
    """Time allocate and free of one size in a pool that is otherwise half full, in one piece."""
    made = PluginRegistry.load().resolve("kv_allocator", allocator)
    pool = TimedPool(num_blocks, BLOCK_SIZE, allocator=made(num_blocks))  # type: ignore[operator]
    pool.allocate(BlockAllocationRequest(num_blocks=num_blocks // 2, sequence_id=SequenceId("others")))
    asked = BlockAllocationRequest(num_blocks=size, sequence_id=SequenceId("a"))
    for _ in range(num_calls + 100):
        pool.free(pool.allocate(asked))
    return {
        "allocator": allocator,
        "blocks": size,
        "allocate_us": spread(pool.allocate_us[101:], digits=2),
        "free_us": spread(pool.free_us[100:], digits=2),
    }


def print_tables(figures: dict[str, Any]) -> None:
    """Print the figures for people; of times minimum, median and p99."""
    from rich.console import Console
    from rich.table import Table

    def text(value: Any) -> str:
        if isinstance(value, dict):
            return " ".join(f"{value[key]:g}" for key in ("min", "median", "p99"))
        return str(value)

    load = Table("figure", *(row["allocator"] for row in figures["load"]), title="load")
    for name in list(figures["load"][0])[1:]:
        load.add_row(name, *(text(row[name]) for row in figures["load"]))
    Console().print(load)
    for title in ("calls", "reading"):
        table = Table(*figures[title][0], title=title)
        for row in figures[title]:
            table.add_row(*map(text, row.values()))
        Console().print(table)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-blocks", type=int, default=10_000)
    parser.add_argument("--num-requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = {
        "load": [
            run_load(name, options.num_blocks, options.num_requests, options.seed, with_cache=with_cache)
            for with_cache in (True, False)
            for name in ALLOCATORS
        ],
        "calls": [
            time_calls(name, options.num_blocks, size)
            for size in (1, 32, 128, 512, 2048)
            for name in ALLOCATORS
        ],
        "reading": measure_reading(),
    }
    if options.json:
        report("fragmentation", num_blocks=options.num_blocks, seed=options.seed, **figures)
    else:
        print_tables(figures)


if __name__ == "__main__":
    main()
