"""The reference experiment: `python benchmarks/reference_experiment.py [--peer vllm=PYTHON] [--out DIR]`.

100 requests, multi-turn and single-turn, in blocks of 16, through the prefix cache, KV pool and eviction
policy that serve, with 10,000 and with 1,000 blocks, and without a prefix cache as the control; vLLM's
block manager replays the same two files in its own interpreter. The ideal saves every token that an
earlier prompt began with. Shared blocks are reused ÷ (reused + new); the source's variant takes for reused
what was allocated and not newly cached, so that a partial last block counts. All figures are asked for
again after every block was freed. `--out` writes a line of JSON a request, and draws how they share.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import machine_line, report
from peer import Conversation, Peer

from sagellm.core import TraceRequest
from sagellm.engines import EngineConfig
from sagellm.engines.cli.output import columns
from sagellm.engines.whole_file import whole_file
from sagellm.lab.plots import plot_replays
from sagellm.lab.simulation.bounds import count_known_tokens, replay_unlimited
from sagellm.lab.simulation.figures import CacheFigures, figures_of, sharing_fractions
from sagellm.lab.simulation.replay import CacheReplay, ReplayedRequest
from sagellm.lab.traces import read_trace

BLOCK_SIZE = 16
CAPACITIES = (10_000, 1_000)
TRACES = {
    name: Path(__file__).parent / "traces" / f"{name}.jsonl.xz" for name in ("multi_turn", "single_turn")
}
SOURCE = ("sharing_fraction_source", "mean_sharing_fraction_source")
HEAD = (
    *(
        "RUN",
        "BLOCKS OF KV",
        "TOKENS",
        "BLOCKS",
        "REUSED",
        "NEW",
        "SHARED",
        "A REQUEST",
        "HIT RATE",
        "OF IDEAL",
    ),
    *("SOURCE: REUSED", "NEW", "SHARED", "A REQUEST", "ERRORS"),
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One replay of a trace."""

    name: str
    capacity: int | None  # None for the ideal, which has no blocks
    requests: list[ReplayedRequest]
    is_cached: bool = True
    is_unchanged_when_freed: bool | None = None  # None where no statistics were kept


def run_ours(requests: Sequence[TraceRequest], capacity: int, *, is_cached: bool) -> Run:
    """Replay through our modules, free every block, and ask for the statistics once more."""
    settings = {"kv.block_size": BLOCK_SIZE, "kv.num_blocks": capacity, "prefix_cache.enabled": is_cached}
    replay = CacheReplay(EngineConfig().with_values(settings))
    replayed = list(replay.run(requests))
    before = statistics(replay)
    replay.kv.manager.check_integrity()
    replay.kv.pool.free(replay.kv.cache.clear())
    if (num_free := replay.kv.pool.get_free_blocks()) != capacity:
        raise SystemExit(f"{num_free} of {capacity} blocks are free after all were freed")
    return Run(
        name="ours" if is_cached else "control: no cache",
        capacity=capacity,
        requests=replayed,
        is_cached=is_cached,
        is_unchanged_when_freed=statistics(replay) == before,
    )


def statistics(replay: CacheReplay) -> dict[str, int]:
    """Return all that cache and pool counted of the requests; not what they hold now."""
    cache, pool = replay.kv.cache.metrics(), replay.kv.pool.metrics()
    return {
        "num_lookups": cache.num_lookups,
        "num_hits": cache.num_hits,
        "num_lookup_tokens": cache.num_lookup_tokens,
        "num_hit_tokens": cache.num_hit_tokens,
        "num_inserted_blocks": cache.num_inserted_blocks,
        "num_allocations": pool.num_allocations,
        "num_failed_allocations": pool.num_failed_allocations,
    }


def run_peer(peer: Conversation, trace: Path, capacity: int) -> Run:
    """Replay through a peer's manager."""
    requests = [ReplayedRequest(**one) for one in peer.ask(str(trace), BLOCK_SIZE, capacity)]
    return Run(name=peer.name, capacity=capacity, requests=requests)


def ideal(requests: Sequence[TraceRequest]) -> Run:
    """Return what would have been saved by tokens; its blocks are those that lie wholly within."""
    found = []
    for request, num_known in zip(requests, count_known_tokens(requests), strict=True):
        num_blocks = -(-request.num_prompt_tokens // BLOCK_SIZE)
        num_reused = num_known // BLOCK_SIZE
        found.append(
            ReplayedRequest(
                arrival_s=request.arrival_s,
                num_prompt_tokens=request.num_prompt_tokens,
                num_held_blocks=0,
                num_saved_tokens=num_known,
                num_reused_blocks=num_reused,
                num_new_blocks=num_blocks - num_reused,
                num_cached_blocks=request.num_prompt_tokens // BLOCK_SIZE - num_reused,
            )
        )
    return Run(name="ideal", capacity=None, requests=found)


def row_of(run: Run, unlimited: list[ReplayedRequest], num_ideal_tokens: int) -> dict[str, Any]:
    """Return a run's figures with the names of the metrics."""
    figures: CacheFigures = figures_of(
        run.requests, unlimited, capacity=run.capacity or 1, block_size=BLOCK_SIZE
    )
    # Where nothing is cached, the source's formula takes every block for a reused one.
    undefined = {} if run.is_cached else dict.fromkeys(SOURCE)
    return {
        "run": run.name,
        "capacity": run.capacity,
        **asdict(figures) | undefined,
        "num_newly_cached_blocks": sum(one.num_cached_blocks for one in run.requests),
        "share_of_ideal": figures.num_saved_tokens / num_ideal_tokens if num_ideal_tokens else 1.0,
        "is_unchanged_when_freed": run.is_unchanged_when_freed,
    }


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Lay out one row of the table."""
    counts = ("num_prompt_tokens", "num_blocks", "num_reused_blocks", "num_new_blocks")
    shares = ("block_sharing_fraction", "mean_block_sharing_fraction", "token_hit_rate", "share_of_ideal")
    num_cached = row["num_newly_cached_blocks"]
    source = ["-"] * 4
    if row[SOURCE[0]] is not None:
        source = [f"{row['num_blocks'] - num_cached:,}", f"{num_cached:,}"]
        source += [f"{row[name]:.2%}" for name in SOURCE]
    return (
        row["run"],
        f"{row['capacity']:,}" if row["capacity"] else "-",
        *(f"{row[name]:,}" for name in counts),
        *(f"{row[name]:.2%}" for name in shares),
        *source,
        str(row["num_refused"]),
    )


def write(folder: Path, name: str, runs: list[Run], rows: list[dict[str, Any]]) -> None:
    """Write a line of JSON for each request of each run, and draw how much requests share."""
    folder.mkdir(parents=True, exist_ok=True)
    with whole_file(folder / f"{name}.jsonl") as partial, partial.open("w", encoding="utf-8") as file:
        for run in runs:
            for index, one in enumerate(run.requests):
                head = {"run": run.name, "capacity": run.capacity, "request": index}
                file.write(json.dumps(head | asdict(one), separators=(",", ":")) + "\n")
    with_blocks = [(run, row) for run, row in zip(runs, rows, strict=True) if run.capacity is not None]
    savings: dict[str, list[tuple[int, float]]] = {}
    for run, row in with_blocks:
        savings.setdefault(run.name, []).append((row["capacity"], row["token_saving"]))
    plot_replays(
        folder / f"{name}.svg",
        title=f"{name}: blocks of {BLOCK_SIZE} tokens",
        savings=savings,
        upper_bound=rows[-1]["token_saving"],
        sharing={
            run.name: sharing_fractions(run.requests)
            for run, _ in with_blocks
            if run.capacity == max(CAPACITIES)
        },
    )


def experiment(trace: Path, peers: list[Conversation]) -> tuple[list[Run], list[dict[str, Any]]]:
    """Make all runs over a trace, the ideal last."""
    requests = read_trace(trace)
    runs = [run_ours(requests, capacity, is_cached=True) for capacity in CAPACITIES]
    runs.append(run_ours(requests, max(CAPACITIES), is_cached=False))
    runs += [run_peer(peer, trace, capacity) for peer in peers for capacity in CAPACITIES]
    runs.append(ideal(requests))
    config = EngineConfig().with_values({"kv.block_size": BLOCK_SIZE})
    unlimited = replay_unlimited(requests, config, lambda _: None)
    num_ideal_tokens = sum(one.num_saved_tokens for one in runs[-1].requests)
    return runs, [row_of(run, unlimited, num_ideal_tokens) for run in runs]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", type=Peer.parse, action="append", default=[], metavar="vllm=PYTHON")
    parser.add_argument("--out", type=Path, metavar="DIR")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    peers = [Conversation(peer, "replay") for peer in options.peer]
    about = {peer.name: peer.hear() for peer in peers}
    found: dict[str, list[dict[str, Any]]] = {}
    for name, trace in TRACES.items():
        runs, found[name] = experiment(trace, peers)
        if options.out is not None:
            write(options.out, name, runs, found[name])
    for peer in peers:
        peer.end()
    if options.json:
        report("reference_experiment", block_size=BLOCK_SIZE, about=about, traces=found)
        return
    print(machine_line())
    for name, rows in found.items():
        kept = [row["is_unchanged_when_freed"] for row in rows if row["is_unchanged_when_freed"] is not None]
        print(f"\n{name}: {rows[0]['num_requests']} requests, blocks of {BLOCK_SIZE}; statistics ", end="")
        print("unchanged" if all(kept) else "CHANGED", "after every block was freed\n")
        print(columns(HEAD, [cells(row) for row in rows]))


if __name__ == "__main__":
    main()
