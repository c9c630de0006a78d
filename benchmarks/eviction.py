"""What each eviction policy saves of the prompt tokens: `python benchmarks/eviction.py [TRACE]`.

Without a trace, `lru`, `reuse` and the optimum (Belady) on eight loads that are made here (`loads.py`), at
five capacities in percent of the load's distinct blocks: points saved over LRU, and the worst of them.

With one, every installed policy, the optimum and no limit, in the trace's own blocks; gap closed =
(policy − LRU) ÷ (Belady − LRU). The trace of the kept figures is `conversation_trace.jsonl` of
https://github.com/kvcache-ai/Mooncake (FAST25-release/traces, Apache-2.0), 12,031 prompts.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import RESULTS, output_flags, publish
from loads import LOADS, num_distinct_blocks

from sagellm.core import PluginRegistry
from sagellm.engines import EngineConfig
from sagellm.engines.cli.output import columns
from sagellm.engines.progress import progress_bar
from sagellm.lab.simulation.runs import CacheRun, Simulation, simulate
from sagellm.lab.traces import read_trace

PERCENTAGES = (5, 25, 50, 75, 95)


def main() -> None:
    """Replay and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path, nargs="?")
    parser.add_argument("--capacity", type=int, nargs="+", default=[1000, 5000, 10_000, 50_000])
    parser.add_argument("--load", choices=LOADS, nargs="+", default=list(LOADS), help="of those made here")
    parser.add_argument("--seed", type=int, nargs="+", default=[1001, 1002], help="of the loads")
    parser.add_argument("--prompts", type=int, default=3000, help="of a load")
    output_flags(parser, "eviction")
    options = parser.parse_args()
    if options.trace is None:
        if options.save == RESULTS / "eviction.json":
            options.save = RESULTS / "eviction-loads.json"
        replay_loads(options)
    else:
        replay_trace(options)


def replay_loads(options: argparse.Namespace) -> None:
    """Compare the default with LRU on every load."""
    found: list[dict[str, Any]] = []
    num_replays = len(options.load) * len(options.seed) * (1 + 3 * len(PERCENTAGES))
    with progress_bar("replaying", total=num_replays * options.prompts) as advance:
        for name in options.load:
            for seed in options.seed:
                requests = LOADS[name](seed, options.prompts)
                num_blocks = num_distinct_blocks(requests)
                config = EngineConfig().with_values({"kv.block_size": requests[0].block_tokens})
                capacities = [max(1, num_blocks * percentage // 100) for percentage in PERCENTAGES]
                policies = ["lru", "reuse", "belady"]
                simulated = simulate(
                    requests, config, capacities=capacities, policies=policies, advance=advance
                )
                cells = _cells(simulated, capacities)
                found.append({"load": name, "seed": seed, "distinct_blocks": num_blocks, "cells": cells})
    worst = min(cell["over_lru"] for one in found for cell in one["cells"])
    head = ("LOAD", "SEED", *(f"{percentage} %: LRU, REUSE, BELADY" for percentage in PERCENTAGES))
    rows = [(one["load"], str(one["seed"]), *map(_compared, one["cells"])) for one in found]
    text = f"{columns(head, rows)}\n\nworst: {100 * worst:+.2f} points over LRU"
    publish("eviction_loads", text, options, prompts=options.prompts, worst_over_lru=worst, loads=found)


def _cells(simulated: Simulation, capacities: list[int]) -> list[dict[str, Any]]:
    cells = []
    for percentage, capacity in zip(PERCENTAGES, capacities, strict=True):
        saved = {
            run.eviction_policy: run.figures.token_saving
            for run in simulated.runs
            if run.capacity == capacity
        }
        over_lru = saved["reuse"] - saved["lru"]
        cells.append({"percentage": percentage, "capacity": capacity, **saved, "over_lru": over_lru})
    return cells


def _compared(cell: dict[str, Any]) -> str:
    over = 100 * (cell["belady"] - cell["lru"])
    return f"{100 * cell['lru']:.1f} {100 * cell['over_lru']:+.2f} {over:+.2f}"


def replay_trace(options: argparse.Namespace) -> None:
    """Compare all policies on one trace."""
    requests = read_trace(options.trace)
    config = EngineConfig().with_values({"kv.block_size": requests[0].block_tokens or 16})
    installed = [entry.provider.name for entry in PluginRegistry.load().providers("eviction_policy")]
    names = [name for name in installed if name != "null"]
    num_replays = 1 + len(options.capacity) * len(names)
    with progress_bar("replaying", total=len(requests) * num_replays) as advance:
        found = simulate(requests, config, capacities=options.capacity, policies=names, advance=advance)
    by_name: dict[str, list[CacheRun]] = {name: [] for name in names}
    for run in found.runs:
        by_name[run.eviction_policy].append(run)
    publish(
        "eviction",
        _text(by_name, options.capacity, found.upper_bound),
        options,
        trace=options.trace.name,
        block_size=found.block_size,
        unlimited=found.upper_bound,
        policies={name: [_entry(run) for run in runs] for name, runs in by_name.items()},
    )


def _text(by_name: dict[str, list[CacheRun]], capacities: list[int], bound: float) -> str:
    rows = [(name, *map(_cell, runs)) for name, runs in by_name.items()]
    table = columns(("POLICY", *(f"{capacity:,} BLOCKS" for capacity in capacities)), rows)
    return f"{table}\n\na cache that never evicts saves {bound:.2%}; in brackets: gap closed"


def _cell(run: CacheRun) -> str:
    gap = "" if run.gap_closed is None else f" ({run.gap_closed:.0%})"
    return f"{run.figures.token_saving:.2%}{gap}"


def _entry(run: CacheRun) -> dict[str, Any]:
    return {"capacity": run.capacity, "gap_closed": run.gap_closed, **asdict(run.figures)}


if __name__ == "__main__":
    main()
