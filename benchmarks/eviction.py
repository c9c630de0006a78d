"""What each eviction policy saves of the prompt tokens: `python benchmarks/eviction.py [TRACE]`.

Without a trace, `lru`, `reuse` and the optimum (Belady) on eight loads that are made here (`loads.py`), at
five capacities in percent of the load's distinct blocks: points saved over LRU, and the worst of them.

With one, every installed policy, the optimum and no limit, in the trace's own blocks; gap closed =
(policy − LRU) ÷ (Belady − LRU). Then its second half, which no constant was tuned on: counted after the
first half, from which policies may have learnt, and replayed alone. Last, the second half served on virtual
time (`cost/h200-8b.json`), where running requests hold blocks, beside the cache alone. The trace of the kept
figures is `conversation_trace.jsonl` of https://github.com/kvcache-ai/Mooncake (FAST25-release/traces,
Apache-2.0), 12,031 prompts.

Both say how many of its evicted blocks `reuse` chose by what it has learnt, the others being by last use.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import RESULTS, output_flags, publish
from loads import LOADS, num_distinct_blocks

from sagellm.core import PluginRegistry, TraceRequest
from sagellm.engines import EngineConfig
from sagellm.engines.cli.output import columns
from sagellm.engines.metrics.cache import gap_closed
from sagellm.engines.progress import progress_bar
from sagellm.lab.simulation.replay import CacheReplay
from sagellm.lab.simulation.runs import CacheRun, simulate
from sagellm.lab.simulation.served_load import LoadSettings
from sagellm.lab.simulation.serving import simulate_serving
from sagellm.lab.simulation.step_costs import read_step_costs
from sagellm.lab.traces import read_trace

COST = Path(__file__).parent / "cost" / "h200-8b.json"
PERCENTAGES = (5, 25, 50, 75, 95)
ALONE = ("lru", "s3fifo", "reuse", "belady")
"""Policies that replay the second half alone."""

NUM_PARTS = 10
"""Parts of a load for which the order in force is told."""

Advance = Callable[[int], None]


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
    parser.add_argument(
        "--stretch",
        type=float,
        default=2.84,
        help="of the served half's time; %(default)s is 0.9 of what FCFS carries; 0: serve nothing",
    )
    parser.add_argument("--served-capacity", type=int, nargs="+", default=[5000, 10_000])
    output_flags(parser, "eviction")
    options = parser.parse_args()
    if options.trace is None:
        if options.save == RESULTS / "eviction.json":
            options.save = RESULTS / "eviction-loads.json"
        replay_loads(options)
    else:
        replay_trace(options)


@dataclass(frozen=True, kw_only=True)
class Followed:
    """What `reuse` saved, and by which order it evicted."""

    token_saving: float
    learnt_share: float | None  # of the evicted blocks; None if there were none
    learnt_share_by_part: list[float | None]  # of the prompts, in order


def follow(
    requests: Sequence[TraceRequest], config: EngineConfig, capacity: int, advance: Advance
) -> Followed:
    """Replay under `reuse` and look into it."""
    values = {"kv.num_blocks": capacity, "prefix_cache.eviction_policy": "reuse"}
    cache = CacheReplay(config.with_values(values))
    counts = [(0.0, 0.0)]  # by last use and by the learnt order, after each part
    num_saved = num_taken = 0
    for part in range(1, NUM_PARTS + 1):
        while num_taken < len(requests) * part // NUM_PARTS:
            num_saved += cache.take(requests[num_taken]).num_saved_tokens
            num_taken += 1
            advance(1)
        told = cache.kv.metrics_of["eviction_policy"]().details
        counts.append((told["num_blocks_by_last_use"], told["num_blocks_by_learnt_order"]))
    return Followed(
        token_saving=num_saved / sum(one.num_prompt_tokens for one in requests),
        learnt_share=_learnt_share(counts[0], counts[-1]),
        learnt_share_by_part=[_learnt_share(*pair) for pair in pairwise(counts)],
    )


def _learnt_share(before: tuple[float, float], after: tuple[float, float]) -> float | None:
    by_use, learnt = (late - early for early, late in zip(before, after, strict=True))
    return learnt / (by_use + learnt) if by_use + learnt else None


def replay_loads(options: argparse.Namespace) -> None:
    """Compare the default with LRU on every load."""
    found: list[dict[str, Any]] = []
    num_replays = len(options.load) * len(options.seed) * (1 + 3 * len(PERCENTAGES))
    with progress_bar("replaying", total=num_replays * options.prompts) as advance:
        for name in options.load:
            for seed in options.seed:
                requests = LOADS[name](seed, options.prompts)
                num_blocks = num_distinct_blocks(requests)
                cells = _cells(requests, num_blocks, advance)
                found.append({"load": name, "seed": seed, "distinct_blocks": num_blocks, "cells": cells})
    worst = min(cell["over_lru"] for one in found for cell in one["cells"])
    head = ("LOAD", "SEED", *(f"{percentage} %: LRU, REUSE, BELADY" for percentage in PERCENTAGES))
    rows = [(one["load"], str(one["seed"]), *map(_compared, one["cells"])) for one in found]
    text = (
        f"{columns(head, rows)}\n\nin brackets: share of the blocks that reuse evicted by what it learnt\n"
        f"worst: {100 * worst:+.2f} points over LRU"
    )
    publish("eviction_loads", text, options, prompts=options.prompts, worst_over_lru=worst, loads=found)


def _cells(requests: list[TraceRequest], num_blocks: int, advance: Advance) -> list[dict[str, Any]]:
    config = EngineConfig().with_values({"kv.block_size": requests[0].block_tokens})
    capacities = [max(1, num_blocks * percentage // 100) for percentage in PERCENTAGES]
    simulated = simulate(requests, config, capacities=capacities, policies=["lru", "belady"], advance=advance)
    cells = []
    for percentage, capacity in zip(PERCENTAGES, capacities, strict=True):
        saved = {
            run.eviction_policy: run.figures.token_saving
            for run in simulated.runs
            if run.capacity == capacity
        }
        reuse = follow(requests, config, capacity, advance)
        saved = {"lru": saved["lru"], "reuse": reuse.token_saving, "belady": saved["belady"]}
        orders = {"learnt_share": reuse.learnt_share, "learnt_share_by_part": reuse.learnt_share_by_part}
        over_lru = saved["reuse"] - saved["lru"]
        cells.append(
            {"percentage": percentage, "capacity": capacity, **saved, "over_lru": over_lru, **orders}
        )
    return cells


def _compared(cell: dict[str, Any]) -> str:
    over = 100 * (cell["belady"] - cell["lru"])
    learnt = _percent(cell["learnt_share"])
    return f"{100 * cell['lru']:.1f} {100 * cell['over_lru']:+.2f} ({learnt}) {over:+.2f}"


def replay_trace(options: argparse.Namespace) -> None:
    """Compare all policies on one trace, on its second half, and where that is served."""
    requests = read_trace(options.trace)
    middle = len(requests) // 2
    config = EngineConfig().with_values({"kv.block_size": requests[0].block_tokens or 16})
    installed = [entry.provider.name for entry in PluginRegistry.load().providers("eviction_policy")]
    names = [name for name in installed if name != "null"]
    capacities: list[int] = options.capacity
    in_half = [name for name in names if name in ALONE]
    num_replayed = len(requests) * (1 + len(capacities) * (len(names) + 1))
    num_replayed += (len(requests) - middle) * (1 + len(capacities) * (len(in_half) + 1))
    with progress_bar("replaying", total=num_replayed) as advance:
        whole = simulate(requests, config, capacities=capacities, policies=names, advance=advance)
        alone = simulate(requests[middle:], config, capacities=capacities, policies=in_half, advance=advance)
        followed = {
            name: [follow(part, config, capacity, advance) for capacity in capacities]
            for name, part in (("whole", requests), ("second half alone", requests[middle:]))
        }
    by_name = _by_policy(whole.runs, names)
    halves = {
        "after_first": {name: [_saving(run, middle) for run in runs] for name, runs in by_name.items()},
        "alone": {
            name: [_saving(run, 0) for run in runs] for name, runs in _by_policy(alone.runs, in_half).items()
        },
    }
    served = serve(requests[middle:], config, options.served_capacity, options.stretch)
    publish(
        "eviction",
        "\n\n".join(
            (
                _text(by_name, capacities, whole.upper_bound),
                *(
                    f"second half, {title}\n{_half_text(halves[name], capacities)}"
                    for name, title in TITLES.items()
                ),
                _orders_text(followed, capacities),
                *([_served_text(served)] if served else []),
            )
        ),
        options,
        trace=options.trace.name,
        block_size=whole.block_size,
        unlimited=whole.upper_bound,
        policies={name: [_entry(run) for run in runs] for name, runs in by_name.items()},
        second_half=halves,
        orders={name: [asdict(one) for one in of] for name, of in followed.items()},
        served=served,
    )


TITLES = {"after_first": "after the first", "alone": "alone"}


def _by_policy(runs: list[CacheRun], names: list[str]) -> dict[str, list[CacheRun]]:
    return {name: [run for run in runs if run.eviction_policy == name] for name in names}


def _saving(run: CacheRun, begin: int) -> float:
    """Return the share of tokens saved, from a prompt on."""
    counted = run.requests[begin:]
    return sum(one.num_saved_tokens for one in counted) / sum(one.num_prompt_tokens for one in counted)


def serve(
    requests: list[TraceRequest], config: EngineConfig, capacities: list[int], stretch: float
) -> list[dict[str, Any]]:
    """Serve on virtual time; return the hit rates beside those of the cache alone."""
    if not stretch:
        return []
    start_s, found = requests[0].arrival_s, []
    requests = [replace(one, arrival_s=one.arrival_s - start_s) for one in requests]
    policies, costs = ("lru", "reuse"), read_step_costs(COST)
    num_runs = 1 + 2 * len(capacities) * len(policies)
    with progress_bar("serving", total=len(requests) * num_runs) as advance:
        alone = simulate(requests, config, capacities=capacities, policies=policies, advance=advance)
        saved = {(one.eviction_policy, one.capacity): one.figures.token_saving for one in alone.runs}
        for capacity in capacities:
            for policy in policies:
                values = {"kv.num_blocks": capacity, "prefix_cache.eviction_policy": policy}
                run = simulate_serving(
                    requests,
                    config.with_values(values),
                    costs,
                    load=LoadSettings(stretch=stretch),
                    advance=advance,
                )
                found.append(
                    {
                        "policy": policy,
                        "capacity": capacity,
                        "stretch": stretch,
                        "token_hit_rate": run.figures.token_hit_rate,
                        "re_prefill_rate": run.figures.re_prefill_rate,
                        "mean_ttft_s": run.figures.ttft_s and run.figures.ttft_s.mean,
                        "cache_alone": saved[policy, capacity],
                    }
                )
    return found


def _text(by_name: dict[str, list[CacheRun]], capacities: list[int], bound: float) -> str:
    rows = [(name, *map(_cell, runs)) for name, runs in by_name.items()]
    table = columns(("POLICY", *(f"{capacity:,} BLOCKS" for capacity in capacities)), rows)
    return f"{table}\n\na cache that never evicts saves {bound:.2%}; in brackets: gap closed"


def _cell(run: CacheRun) -> str:
    return _with_gap(run.figures.token_saving, run.gap_closed)


def _with_gap(saving: float, gap: float | None) -> str:
    return f"{saving:.2%}" + ("" if gap is None else f" ({gap:.0%})")


def _half_text(savings: dict[str, list[float]], capacities: list[int]) -> str:
    rows = []
    for name, values in savings.items():
        bounds = zip(values, savings["lru"], savings["belady"], strict=True)
        is_bound = name in ("lru", "belady")
        cells = (
            _with_gap(value, None if is_bound or best <= lru else gap_closed(value, lru, best))
            for value, lru, best in bounds
        )
        rows.append((name, *cells))
    return columns(("POLICY", *(f"{capacity:,} BLOCKS" for capacity in capacities)), rows)


def _orders_text(followed: dict[str, list[Followed]], capacities: list[int]) -> str:
    rows = [
        (name, f"{capacity:,}", _percent(one.learnt_share), " ".join(map(_percent, one.learnt_share_by_part)))
        for name, of in followed.items()
        for capacity, one in zip(capacities, of, strict=True)
    ]
    head = ("REUSE ON", "BLOCKS", "EVICTED BY WHAT IT LEARNT", "BY TENTHS OF THE PROMPTS")
    return columns(head, rows)


def _served_text(served: list[dict[str, Any]]) -> str:
    rows = [
        (
            one["policy"],
            f"{one['capacity']:,}",
            f"{one['cache_alone']:.2%}",
            f"{one['token_hit_rate']:.2%}",
            f"{one['re_prefill_rate']:.1%}",
            "-" if one["mean_ttft_s"] is None else f"{one['mean_ttft_s']:.2f} s",
        )
        for one in served
    ]
    head = ("SECOND HALF SERVED", "BLOCKS", "CACHE ALONE", "HIT RATE", "RE-PREFILL", "MEAN TTFT")
    return columns(head, rows)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _entry(run: CacheRun) -> dict[str, Any]:
    return {"capacity": run.capacity, "gap_closed": run.gap_closed, **asdict(run.figures)}


if __name__ == "__main__":
    main()
