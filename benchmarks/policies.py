"""What scheduler passes gain on recorded load: `python benchmarks/policies.py TRACE`, on virtual time.

The trace of the kept figures is `conversation_trace.jsonl` of https://github.com/kvcache-ai/Mooncake
(FAST25-release/traces, Apache-2.0), the costs are `cost/h200-8b.json`, a stated roofline. Everything that
schedules and keeps KV is what serves; steps take what the roofline says, and the host takes no time.

1. `choice`: the trace is halved. On the first half, at 0.9 of the load that FCFS can carry (its requests
   per second when all of them wait at once), the pipeline with the highest goodput is chosen, and among those
   within 2 % of it the one with the lowest mean TTFT. On the second half it is compared with FCFS at 0.7,
   0.9 and 1.1.
2. `priority`: one request in ten, of at most 2,048 tokens, is urgent, at 0.9 of the load.
3. `blocks`: re-prefill with 1,000 … 20,000 blocks under the chosen pipeline, beside what a cache alone
   computes again under LRU and Belady's policy (`sage llm simulate --cache-only`).
4. `targets`: the time that a step may take, 50 ms here, decides how much of `max_num_batched_tokens` it
   uses. FCFS and the chosen pipeline at 0.9 of the load with longer steps too.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from common import output_flags, publish

from sagellm.core import PluginRegistry, TraceRequest
from sagellm.engines import EngineConfig
from sagellm.engines.cli.output import columns
from sagellm.lab.simulation.runs import simulate as replay_cache
from sagellm.lab.simulation.served_load import LoadSettings, ServedRequest
from sagellm.lab.simulation.serving import ServingRun, simulate_serving, with_passes
from sagellm.lab.simulation.serving_figures import Tail
from sagellm.lab.simulation.step_costs import read_step_costs
from sagellm.lab.traces import read_trace

COST = Path(__file__).parent / "cost" / "h200-8b.json"

FCFS = "order=none,share=none,preempt=none"
"""First come, first served, with prompts cut as always; without priorities the engine's own order."""

STARVATION_LIMIT_S = 60
"""No request may wait longer at the main load."""

STARVATION_S = 30
"""When a waiting request goes first: early enough for those that wait with it."""

CANDIDATES = (
    FCFS,
    f"order=lifetime{{starvation_s={STARVATION_S}}},share=none,preempt=memory-aware",
    f"order=lifetime{{starvation_s={STARVATION_S},untrusted=mean}},share=none,preempt=memory-aware",
    f"order=prefix-aware{{starvation_s={STARVATION_S}}},share=none,preempt=memory-aware",
    f"order=deadline{{ttft_s=2,tpot_ms=50,starvation_s={STARVATION_S}}},share=none,preempt=memory-aware",
    f"order=batching{{starvation_s={STARVATION_S}}},share=none,preempt=memory-aware",
    "order=mlfq{quantum=2048},share=none,preempt=memory-aware",
)
URGENT = "order=priority{ageing_s=120},share=none,preempt=memory-aware"

LOADS = (0.7, 0.9, 1.1)
MAIN_LOAD = 0.9
URGENT_SHARE, URGENT_TOKENS = 0.1, 2048
BLOCKS = (1000, 5000, 10_000, 20_000)
TARGETS_MS = (50, 75, 100, 200)
SATURATED = 1e-6
"""A stretch with which all requests come at once."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One simulated run. `share_urgent` of the requests are urgent; `is_told`: the engine knows."""

    trace: Path
    half: int | None  # 0 or 1; None: the whole trace
    limit: int | None
    passes: str
    stretch: float
    num_blocks: int | None = None
    target_ms: float | None = None  # None: the default
    share_urgent: float = 0.0
    is_told: bool = True


def requests_of(job: Job) -> list[TraceRequest]:
    """Return a run's requests, on a clock that starts with the first."""
    requests = _trace(job.trace, job.limit)
    if job.half is not None:
        middle = len(requests) // 2
        requests = requests[:middle] if job.half == 0 else requests[middle:]
        start_s = requests[0].arrival_s
        requests = [replace(one, arrival_s=one.arrival_s - start_s) for one in requests]
    if not job.share_urgent or not job.is_told:
        return requests
    urgent = urgent_places(requests, job.share_urgent)
    return [replace(one, priority=int(place in urgent)) for place, one in enumerate(requests)]


def urgent_places(requests: Sequence[TraceRequest], share: float) -> set[int]:
    """Choose so many requests with short prompts; the same ones each time."""
    short = [place for place, one in enumerate(requests) if one.num_prompt_tokens <= URGENT_TOKENS]
    return set(Random("urgent").sample(short, min(len(short), round(share * len(requests)))))


@cache
def _trace(path: Path, limit: int | None) -> list[TraceRequest]:
    return read_trace(path, limit=limit)


def run(job: Job) -> dict[str, Any]:
    """Simulate one run and return its figures."""
    requests = requests_of(job)
    block_size = requests[0].block_tokens or 16
    values: dict[str, Any] = {"kv.block_size": block_size, "kv.num_blocks": job.num_blocks}
    if job.target_ms is not None:
        values["scheduler.step_target_ms"] = job.target_ms
    config = with_passes(EngineConfig().with_values(values), job.passes)
    done = simulate_serving(requests, config, read_step_costs(COST), load=LoadSettings(stretch=job.stretch))
    found = {"passes": job.passes, "stretch": job.stretch, "half": job.half, **_summary(done)}
    if job.share_urgent:
        urgent = urgent_places(requests, job.share_urgent)
        own = [one for place, one in enumerate(done.requests) if place in urgent]
        waited = Tail.of(_waits(own))
        found |= {"num_urgent": len(own), "urgent_queueing_s": None if waited is None else asdict(waited)}
    return found


def _summary(done: ServingRun) -> dict[str, Any]:
    figures = asdict(done.figures)
    figures.pop("by_tenant")
    figures.pop("by_priority")
    scheduler = done.scheduler
    passes = {} if scheduler is None else {one.name: one.num_decisions for one in scheduler.passes}
    return {"num_blocks": done.config.kv.num_blocks, **figures, "decisions": passes}


def _waits(served: Sequence[ServedRequest]) -> list[float]:
    return [(one.scheduled_ns - one.arrival_ns) / 1e9 for one in served if one.scheduled_ns is not None]


def is_installed(passes: str) -> bool:
    """Say whether every pass of a pipeline is."""
    known = {entry.provider.name for entry in PluginRegistry.load().providers("scheduler_pass")}
    config = with_passes(EngineConfig(), passes).scheduler
    return all(spec.name in known for spec in config.pipeline)


Runner = Callable[[Sequence[Job]], list[dict[str, Any]]]


def stretches(base: Job, run_all: Runner, halves: Sequence[int]) -> tuple[dict[int, float], list[Any]]:
    """Return, for each half, the stretch with which requests come as fast as FCFS can serve them."""
    jobs = [replace(base, passes=FCFS, half=half, stretch=SATURATED) for half in halves]
    found = run_all(jobs)
    rates = {}
    for job, figures in zip(jobs, found, strict=True):
        requests = requests_of(job)
        rate = len(requests) / (requests[-1].arrival_s - requests[0].arrival_s)
        rates[job.half or 0] = rate / figures["request_throughput_per_s"]
    return rates, found


def choose(
    base: Job, capacity: dict[int, float], run_all: Runner, candidates: Sequence[str]
) -> dict[str, Any]:
    """Choose on the first half, and score the choice on the second."""
    found = run_all(
        [replace(base, passes=each, half=0, stretch=capacity[0] / MAIN_LOAD) for each in candidates]
    )
    best = max(one["goodput_requests_per_s"] for one in found)
    near = [one for one in found if one["goodput_requests_per_s"] >= 0.98 * best]
    chosen = min(near, key=lambda one: one["ttft_s"]["mean"])["passes"]
    jobs = [
        replace(base, passes=each, half=1, stretch=capacity[1] / load)
        for load in LOADS
        for each in (FCFS, chosen)
    ]
    scored = [
        {"load": load, "fcfs": fcfs, "chosen": mine, **gains(fcfs, mine)}
        for load, (fcfs, mine) in zip(LOADS, _pairs(run_all(jobs)), strict=True)
    ]
    return {"first_half": found, "chosen": chosen, "second_half": scored}


def _pairs(values: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return list(zip(values[::2], values[1::2], strict=True))


def gains(fcfs: dict[str, Any], mine: dict[str, Any]) -> dict[str, float]:
    """Return what a pipeline gains on FCFS: mine ÷ FCFS − 1."""
    return {
        "goodput_gain": mine["goodput_requests_per_s"] / max(fcfs["goodput_requests_per_s"], 1e-9) - 1,
        "mean_ttft_gain": mine["ttft_s"]["mean"] / fcfs["ttft_s"]["mean"] - 1,
        "throughput_gain": mine["output_throughput_tokens_per_s"] / fcfs["output_throughput_tokens_per_s"]
        - 1,
    }


def prioritise(base: Job, stretch: float, run_all: Runner) -> dict[str, Any]:
    """Compare the delay of urgent requests where the engine does not know them, and where it does."""
    job = replace(base, half=1, stretch=stretch, share_urgent=URGENT_SHARE)
    names = ["fcfs", "priorities alone", "order=priority"]
    jobs = [replace(job, passes=FCFS, is_told=False), replace(job, passes=FCFS)]
    if is_installed(URGENT):
        jobs.append(replace(job, passes=URGENT))
    return dict(zip(names, run_all(jobs), strict=False))


def vary_blocks(base: Job, stretch: float, chosen: str, run_all: Runner) -> list[dict[str, Any]]:
    """Compare what is computed again at several capacities with what a cache alone would."""
    jobs = [
        replace(base, half=1, stretch=stretch, passes=chosen, num_blocks=num_blocks) for num_blocks in BLOCKS
    ]
    served = run_all(jobs)
    requests = requests_of(jobs[0])
    config = EngineConfig().with_values({"kv.block_size": requests[0].block_tokens or 16})
    alone = replay_cache(
        requests, config, capacities=BLOCKS, policies=["lru", "belady"], advance=lambda amount: None
    )
    rates = {(one.eviction_policy, one.capacity): one.figures.re_prefill_rate for one in alone.runs}
    return [
        {
            "num_blocks": num_blocks,
            "re_prefill_rate": one["re_prefill_rate"],
            "lru_re_prefill_rate": rates["lru", num_blocks],
            "belady_re_prefill_rate": rates["belady", num_blocks],
            "run": one,
        }
        for num_blocks, one in zip(BLOCKS, served, strict=True)
    ]


def vary_targets(base: Job, stretch: float, chosen: str, run_all: Runner) -> list[dict[str, Any]]:
    """Show what longer steps do to both pipelines."""
    jobs = [
        replace(base, half=1, stretch=stretch, passes=each, target_ms=target_ms)
        for target_ms in TARGETS_MS
        for each in (FCFS, chosen)
    ]
    return [{"target_ms": job.target_ms, "run": one} for job, one in zip(jobs, run_all(jobs), strict=True)]


_HEAD = (
    "PIPELINE", "LOAD", "GOODPUT/S", "TOKENS/S", "TTFT MEAN", "P99", "TPOT MEAN", "LONGEST WAIT", "HIT RATE",
    "RE-PREFILL", "BATCHING", "OF THE STEP'S BUDGET",
)  # fmt: skip


def _row(one: dict[str, Any], load: object) -> tuple[str, ...]:
    return (
        one["passes"],
        str(load),
        f"{one['goodput_requests_per_s']:.3f}",
        f"{one['output_throughput_tokens_per_s']:.0f}",
        f"{one['ttft_s']['mean']:.2f} s",
        f"{one['ttft_s']['p99']:.1f} s",
        f"{1e3 * one['tpot_s']['mean']:.1f} ms",
        f"{one['queueing_s']['max']:.1f} s",
        f"{one['token_hit_rate']:.1%}",
        f"{one['re_prefill_rate']:.1%}",
        _share(one["batching_efficiency"]),
        _share(one["lowered_batching_efficiency"]),
    )


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def as_text(found: dict[str, Any]) -> str:
    """Show what was chosen, the scores, the urgent requests and the blocks."""
    parts = [f"FCFS carries {found['capacity_requests_per_s']} requests/s of the halves"]
    if choice := found.get("choice"):
        rows = [_row(one, MAIN_LOAD) for one in choice["first_half"]]
        parts.append("first half\n" + columns(_HEAD, rows))
        rows = [_row(one[name], one["load"]) for one in choice["second_half"] for name in ("fcfs", "chosen")]
        parts.append("second half\n" + columns(_HEAD, rows))
        parts += [
            f"at {one['load']}: goodput {one['goodput_gain']:+.1%}, mean TTFT {one['mean_ttft_gain']:+.1%}, "
            f"throughput {one['throughput_gain']:+.1%}"
            for one in choice["second_half"]
        ]
    for name, one in found.get("priority", {}).items():
        tail = one["urgent_queueing_s"]
        parts.append(
            f"{name}: {one['num_urgent']} urgent requests waited {tail['mean']:.3f} s, "
            f"P99 {tail['p99']:.3f} s; the longest wait of all is {one['queueing_s']['max']:.1f} s"
        )
    if blocks := found.get("blocks"):
        rows = [
            (
                f"{one['num_blocks']:,}",
                f"{one['re_prefill_rate']:.1%}",
                f"{one['lru_re_prefill_rate']:.1%}",
                f"{one['belady_re_prefill_rate']:.1%}",
            )
            for one in blocks
        ]
        head = ("BLOCKS", "RE-PREFILL", "LRU, CACHE ALONE", "BELADY, CACHE ALONE")
        parts.append(columns(head, rows))
    if targets := found.get("targets"):
        head = ("PIPELINE", "STEP TARGET", *_HEAD[2:])
        rows = [_row(one["run"], f"{one['target_ms']:g} ms") for one in targets]
        parts.append(columns(head, rows))
    return "\n\n".join(parts)


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--limit", type=int, help="take so many requests of the trace")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--parts", nargs="+", default=["choice", "priority", "blocks", "targets"])
    parser.add_argument("--chosen", default=FCFS, help="the pipeline of the other parts, without `choice`")
    output_flags(parser, "policies-h200-8b")
    options = parser.parse_args()
    candidates = [each for each in CANDIDATES if is_installed(each)]
    base = Job(trace=options.trace, half=None, limit=options.limit, passes=FCFS, stretch=1.0)
    with ProcessPoolExecutor(options.jobs) as pool:

        def run_all(jobs: Sequence[Job]) -> list[dict[str, Any]]:
            return list(pool.map(run, jobs))

        halves = (0, 1) if "choice" in options.parts else (1,)
        capacity, saturated = stretches(base, run_all, halves)
        found: dict[str, Any] = {
            "trace": options.trace.name,
            "limit": options.limit,
            "cost": read_step_costs(COST).source,
            "capacity_requests_per_s": [round(one["request_throughput_per_s"], 3) for one in saturated],
            "saturated": saturated,
            "starvation_limit_s": STARVATION_LIMIT_S,
            "left_out": [each for each in CANDIDATES if each not in candidates],
        }
        chosen = options.chosen
        if "choice" in options.parts:
            found["choice"] = choose(base, capacity, run_all, candidates)
            chosen = found["choice"]["chosen"]
        if "priority" in options.parts:
            found["priority"] = prioritise(base, capacity[1] / MAIN_LOAD, run_all)
        if "blocks" in options.parts:
            found["blocks"] = vary_blocks(base, capacity[1] / MAIN_LOAD, chosen, run_all)
        if "targets" in options.parts:
            found["targets"] = vary_targets(base, capacity[1] / MAIN_LOAD, chosen, run_all)
    publish("policies", as_text(found), options, **found)


if __name__ == "__main__":
    main()
