"""How fast serving is simulated: `OMP_NUM_THREADS=1 python benchmarks/simulator.py --traces DIR`.

Whole runs of `simulate_serving` in one thread, without reading the trace and starting Python: requests a
second, steps a second, and microseconds for each, of CPU time. Loads are those of `policies.py` at shares of
what FCFS carries: Azure's conversations, chats of several turns, agents behind long prompts and tenants, each
under first come, first served without a predictor and under the default pipeline with the default predictor;
and Mooncake's conversations, if `conversation_trace.jsonl` (https://github.com/kvcache-ai/Mooncake,
Apache-2.0) is in `--traces`, plain or compressed. `digest` is of what became of each request: it stays the
same as long as results do. `foreign_cores` are those that other processes kept busy before and after: on a
shared machine a core is slower.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import astuple
from hashlib import blake2b
from pathlib import Path
from time import process_time
from typing import Any

from common import foreign_cores, output_flags, publish, spread
from policies import (
    AZURE,
    COST,
    DEFAULT,
    FCFS,
    MOONCAKE,
    NOTHING,
    Job,
    Source,
    capacity_of,
    open_load,
    simulate,
)

from sagellm.engines.cli.output import columns

SHARES = (0.7, 0.9)
PIPELINES = {"fcfs, null": (FCFS, NOTHING), "default, statistical": (DEFAULT, "statistical")}
LOADS = ("chat", "agents", "tenants")

_HEAD = (
    "LOAD",
    "OF CAPACITY",
    "PASSES, PREDICTOR",
    "STEPS",
    "REQUESTS/S",
    "STEPS/S",
    "µs/STEP",
    "µs/REQUEST",
)


def sources(options: argparse.Namespace) -> Iterator[Source]:
    """Yield where requests come from."""
    num = options.requests
    if options.traces is not None:
        for name in MOONCAKE:
            if (path := options.traces / name).is_file():
                yield Source(name="mooncake", trace=path, limit=num)
    yield Source(name="azure", trace=AZURE, limit=num)
    for name in LOADS:
        yield Source(name=name, seed=1, limit=num)


def measure(job: Job, repeats: int) -> dict[str, Any]:
    """Simulate a run several times."""
    times_s = []
    for _ in range(repeats):
        started_s = process_time()
        done = simulate(job)
        times_s.append(process_time() - started_s)
    num_requests, num_steps = len(done.requests), done.figures.num_steps
    told = repr([astuple(one) for one in done.requests]) + repr(done.figures) + repr(done.predictor)
    return {
        "num_requests": num_requests,
        "num_steps": num_steps,
        "requests_per_s": spread([num_requests / took_s for took_s in times_s], 1),
        "steps_per_s": spread([num_steps / took_s for took_s in times_s], 1),
        "us_per_step": spread([1e6 * took_s / num_steps for took_s in times_s], 1),
        "us_per_request": spread([1e6 * took_s / num_requests for took_s in times_s], 1),
        "digest": blake2b(told.encode(), digest_size=8).hexdigest(),
    }


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the figures of each load under each pipeline."""
    for source in sources(options):
        if options.only and not any(source.name.startswith(name) for name in options.only):
            continue
        capacity = capacity_of(source, COST)
        for share in options.shares:
            load = open_load(source, capacity, share)
            for name, (passes, predictor) in PIPELINES.items():
                job = Job(source=source, cost=COST, passes=passes, predictor=predictor, load=load)
                found = measure(job, options.repeats)
                yield {"load": source.name, "share": share, "pipeline": name, **found}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the medians."""
    keys = ("requests_per_s", "steps_per_s", "us_per_step", "us_per_request")
    return columns(
        _HEAD,
        [
            (
                one["load"],
                f"{one['share']:g}",
                one["pipeline"],
                f"{one['num_steps']:,}",
                *(f"{one[key]['median']:,.0f}" for key in keys),
            )
            for one in rows
        ],
    )


def main() -> None:
    """Parse the flags, measure and publish."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=Path, help="a folder with Mooncake's trace")
    parser.add_argument("--requests", type=int, default=1000, help="of each load; default: %(default)s")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    parser.add_argument("--only", nargs="+", help="loads whose names begin so")
    parser.add_argument("--repeats", type=int, default=3)
    output_flags(parser, "simulator")
    options = parser.parse_args()
    busy = foreign_cores()
    rows = list(run(options))
    figures = {"requests": options.requests, "foreign_cores": [busy, foreign_cores()], "runs": rows}
    publish("simulator", table(rows), options, **figures)


if __name__ == "__main__":
    main()
