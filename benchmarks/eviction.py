"""What each eviction policy saves of the prompt tokens: `python benchmarks/eviction.py TRACE`.

Every installed policy, the optimum (Belady) and no limit; gap closed = (policy − LRU) ÷ (Belady − LRU).
Blocks are the trace's own.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import output_flags, publish

from sagellm.core import PluginRegistry
from sagellm.engines import EngineConfig
from sagellm.engines.cli.output import columns
from sagellm.engines.progress import progress_bar
from sagellm.engines.simulation.runs import CacheRun, simulate
from sagellm.engines.traces import read_trace


def main() -> None:
    """Replay and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--capacity", type=int, nargs="+", default=[1000, 5000, 10_000, 50_000])
    output_flags(parser, "eviction")
    options = parser.parse_args()
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
