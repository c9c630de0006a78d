"""Random operations against models, from many seeds: `python benchmarks/seeds.py`, or `hatch run seeds`.

A seed runs one of the machines: the allocators, the pool, the radix tree, tiers that are late or fail, the
KV manager under compaction, a whole engine over such tiers on virtual time, and the whole served system with
faults. All integrity checks run after every operation (every tenth of a tier or engine, every sixteenth turn
of a served core). A violation is printed with the flags that reproduce it, and makes the exit code 1.

    python benchmarks/seeds.py --machine "radix tree" --first 137 --seeds 1
    python benchmarks/seeds.py --machine served --seeds 10000 --save results/seeds-served.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from common import record, save

from sagellm.core import PluginRegistry, Randomness, VirtualClock
from sagellm.core.late_kv_tier import LateKVTier
from sagellm.core.runtime import MemoryFiles
from sagellm.engines.cli.output import columns
from sagellm.kvmgr.kv_pool import BuddyAllocator, FreeListAllocator, PagedKVPool
from sagellm.kvmgr.kv_pool.tiers.backend_tier import BackendTier
from sagellm.kvmgr.kv_pool.tiers.backends import DDRBackend, NVMeBackend
from sagellm.kvmgr.kv_pool.tiers.storage import TieredKVStorage
from sagellm.kvmgr.prefix_cache import RadixPrefixCache
from sagellm.lab.simulation.served.seeds import Totals, run_seeds as run_served_seeds
from sagellm.testing import (
    AuditingEvictionPolicy,
    KVAllocatorContract,
    KVPoolContract,
    PrefixCacheMachine,
)
from sagellm.testing.kv_tier_model import KVTierMachine

TESTS = Path(__file__).parents[1] / "engines" / "tests"
PROGRESS_S = 10.0


class Machine(NamedTuple):
    """A random-operations test, and its number of operations per seed."""

    run: Callable[[int, int], None]
    num_operations: int


class Violation(NamedTuple):
    """A failure that a seed found."""

    machine: str
    seed: int
    error: str


class _FreeList(KVAllocatorContract):
    def make(self, total_blocks: int) -> FreeListAllocator:
        return FreeListAllocator(total_blocks)


class _Buddy(KVAllocatorContract):
    def make(self, total_blocks: int) -> BuddyAllocator:
        return BuddyAllocator(total_blocks)


class _Pool(KVPoolContract):
    def make(self, total_blocks: int, block_size: int, clock: Any) -> PagedKVPool:
        return PagedKVPool(total_blocks, block_size, clock=clock)


def run_allocator(seed: int, num_operations: int) -> None:
    """Run the free list on even seeds, buddies on odd ones."""
    contract = (_FreeList, _Buddy)[seed % 2]()
    contract.run_random_operations(num_operations, check_every=1, seed=seed)


def run_pool(seed: int, num_operations: int) -> None:
    """Run the pool with references, copies and moves."""
    _Pool().run_alone(num_operations, check_every=1, seed=seed)


def run_radix_tree(seed: int, num_operations: int) -> None:
    """Run the prefix cache in blocks of 1 to 3 tokens, with its own order or a policy."""
    policy = AuditingEvictionPolicy() if seed % 2 else None
    block_size = 1 + seed % 3
    cache = RadixPrefixCache(40, block_size, eviction_policy=policy, clock=VirtualClock())
    PrefixCacheMachine(cache, block_size, Randomness(seed).stream("operations")).run(num_operations)


def run_tiers(seed: int, num_operations: int) -> None:
    """Run host memory over a file, both with delays; on odd seeds one operation in twenty fails."""
    failures = 0.05 * (seed % 2)
    tiers = {
        name: LateKVTier(BackendTier(backend), Randomness(seed).stream(name), failure_rate=failures)
        for name, backend in {
            "host": DDRBackend(10 * 4096),
            "file": NVMeBackend("/tier", 20 * 4096, files=MemoryFiles()),
        }.items()
    }
    tiered = TieredKVStorage(tiers, clock=VirtualClock())
    KVTierMachine(tiered, Randomness(seed).stream("operations")).run(num_operations, check_every=10)
    tiered.close()


def run_manager(seed: int, num_operations: int) -> None:
    """Run the KV manager over a memory that knows what each slot must hold, with compaction."""
    allocator = ("free_list", "buddy")[seed % 2]
    load = suite("test_compaction_model").Load(registry(), seed, allocator, with_cache=bool(seed % 5))
    for _ in range(num_operations):
        load.step()
    while load.running:
        load.end()
    load.kv.clear_cache()
    assert load.pool.get_free_blocks() == load.pool.total_blocks, "blocks are missing at the end"


def run_engine(seed: int, num_operations: int) -> None:
    """Run scheduler, cache, pool, tiers and compaction over a model that reads what its blocks hold."""
    with tempfile.TemporaryDirectory() as folder:
        suite("test_tier_simulation").Simulation(seed, folder).run(num_operations)


def run_served(seed: int, _: int) -> None:
    """Run clients, front, supervisor, core and tiers with faults."""
    for failure in run_served_seeds([seed], Totals()):
        raise AssertionError(str(failure))


MACHINES = {
    "allocator": Machine(run_allocator, 3000),
    "pool": Machine(run_pool, 1000),
    "radix tree": Machine(run_radix_tree, 3000),
    "tiers": Machine(run_tiers, 3000),
    "manager": Machine(run_manager, 600),
    "engine": Machine(run_engine, 500),
    "served": Machine(run_served, 10),  # requests, besides faults
}


@cache
def suite(name: str) -> ModuleType:
    """Import a test module of the engine, whose machines are used here too."""
    spec = spec_from_file_location(name, TESTS / f"{name}.py")
    assert spec is not None and spec.loader is not None, name  # noqa: PT018
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def registry() -> PluginRegistry:
    """Return the plugin registry, read once per process."""
    return PluginRegistry.load()


def run_seed(job: tuple[str, int]) -> tuple[str, float, Violation | None]:
    """Run one machine from one seed; return its name, the CPU seconds, and what it found."""
    name, seed = job
    started_s = time.process_time()
    machine, violation = MACHINES[name], None
    try:
        machine.run(seed, machine.num_operations)
    except (Exception, pytest.fail.Exception):  # the latter comes from pytest.raises in the kit
        violation = Violation(name, seed, traceback.format_exc())
    return name, time.process_time() - started_s, violation


def run_seeds(
    jobs: list[tuple[str, int]], num_processes: int
) -> Iterator[tuple[str, float, Violation | None]]:
    """Run jobs in other processes and yield their results as they finish."""
    context = multiprocessing.get_context("spawn")  # torch is not safe to fork
    with context.Pool(num_processes) as pool:
        yield from pool.imap_unordered(run_seed, jobs, chunksize=4)


def main() -> int:
    """Run the seeds, showing progress, and print a table."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument(
        "--seeds", type=int, default=2000, help="of all machines together; default: %(default)s"
    )
    parser.add_argument("--first", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--machine", choices=MACHINES, action="append", help="may be given again")
    parser.add_argument("--processes", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--save", type=Path, help="keep the figures in this file")
    options = parser.parse_args()
    names = options.machine or list(MACHINES)
    jobs = [
        (names[number % len(names)], options.first + number // len(names)) for number in range(options.seeds)
    ]

    num_done, cpu_s = Counter[str](), dict.fromkeys(names, 0.0)
    violations: list[Violation] = []
    shown_s = started_s = time.monotonic()
    for name, seconds, violation in run_seeds(jobs, options.processes):
        num_done[name] += 1
        cpu_s[name] += seconds
        if violation is not None:
            violations.append(violation)
            again = f'--machine "{name}" --first {violation.seed} --seeds 1'
            print(
                f"{violation.error}seed {violation.seed} of {name}: reproduce with {again}", file=sys.stderr
            )
        if time.monotonic() - shown_s > PROGRESS_S:
            shown_s = time.monotonic()
            done = f"{num_done.total()} of {len(jobs)} seeds, {len(violations)} violations"
            print(f"{done}, {shown_s - started_s:.0f} s", file=sys.stderr, flush=True)

    found = Counter(violation.machine for violation in violations)
    rows = [
        {
            "machine": name,
            "seeds": num_done[name],
            "operations": num_done[name] * MACHINES[name].num_operations,
            "violations": found[name],
            "cpu_s": round(cpu_s[name], 1),
        }
        for name in names
    ]
    failed = [{"machine": each.machine, "seed": each.seed, "error": each.error} for each in violations]
    figures = {"first_seed": options.first, "machines": rows, "violations": failed}
    text = json.dumps(record("seeds", **figures), indent=1)
    if options.save is not None:
        save(options.save, text + "\n")
    cells = [[str(cell) for cell in row.values()] for row in rows]
    print(text if options.json else columns(list(rows[0]), cells))
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
