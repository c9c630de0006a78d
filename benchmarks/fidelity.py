"""How well the cost model predicts the engine: `python benchmarks/fidelity.py [MODEL]`.

Steps of one mix are measured on the real engine and fitted (as `sage llm bench fit` does), and what the host
does between them. Another load, conversations that share prefixes and bursts of long prompts with short
outputs, then runs on the real engine, and once more on virtual time with the fitted costs: each real step is
predicted, and the simulated run's total time and TTFT are compared with the real one's. Two rates: one that
leaves the engine idle at times, one above its capacity (requests a second when all come at once, as
simulated). There TTFT is the difference between two times, that of service and that of arrivals, so its
error is a multiple of theirs. Both mixes are measured in turns, and a run is simulated with the costs of the
steps right before and after it, as the speed of a machine drifts. Each run of the load begins on an engine
that has just been loaded, as the simulated one does: the queue's order, the predictor and the engine's own
fit of costs remember what ran before.

With --cpu-time, one thread computes and the clock is the process's CPU time, so that other processes
of a shared machine count less; idle time is skipped on both sides.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from random import Random
from statistics import fmean, median
from time import process_time_ns, time
from typing import Any, NamedTuple

from common import foreign_cores, output_flags, publish

from sagellm.core import Clock, Runtime, TraceRequest, pack
from sagellm.engines import EngineConfig
from sagellm.engines.cli.output import columns
from sagellm.engines.metrics.latency import percentile
from sagellm.lab.bench.step_fit import (
    FitSettings,
    MeasuredStep,
    RecordedCore,
    errors_of,
    fit_steps,
    total_error_of,
)
from sagellm.lab.simulation.conversations import ConversationSettings, simulate_clients
from sagellm.lab.simulation.served_load import LoadSettings, ServedRequest
from sagellm.lab.simulation.serving import simulate_serving
from sagellm.lab.simulation.step_costs import StepCosts
from sagellm.lab.traces.lengths import Lengths


class CPUClock(Clock):
    """The CPU time of this process; sleeping only moves it on."""

    def __init__(self) -> None:
        self._slept_ns = 0

    def now_ns(self) -> int:
        """Return CPU time and time slept."""
        return process_time_ns() + self._slept_ns

    def wall_s(self) -> float:
        """Return `time.time()`."""
        return time()

    def sleep_ns(self, duration_ns: int) -> None:
        """Move on."""
        self._slept_ns += duration_ns


def judged_load(options: argparse.Namespace) -> list[TraceRequest]:
    """Make conversations behind one system message and bursts of long prompts, unlike what is fitted."""
    settings = ConversationSettings(
        num_requests=options.requests - round(options.burst_share * options.requests),
        turns=Lengths.parse("uniform:1:4"),
        system_len=options.scale * 4,
        user_len=Lengths.parse(f"lognormal:{options.scale * 5}:0.6"),
        output_len=Lengths.parse(f"lognormal:{options.scale * 2}:0.6"),
        think_s=Lengths.parse("exponential:20"),
        rate=1.0,
        vocab_size=options.vocab_size,
        seed=options.seed + 1,
    )
    most = options.max_len
    talks = [
        one for one in simulate_clients(settings) if one.num_prompt_tokens + one.num_output_tokens <= most
    ]
    rng = Random(f"bursts {options.seed}")
    bursts: list[TraceRequest] = []
    while len(bursts) < options.requests - settings.num_requests:
        arrival_s = rng.uniform(0.0, talks[-1].arrival_s)
        for _ in range(rng.randint(3, 9)):
            num_tokens, num_output_tokens = rng.randint(most // 3, most - 16), rng.randint(2, 16)
            prompt = pack(rng.choices(range(3, options.vocab_size), k=num_tokens))
            bursts.append(TraceRequest(arrival_s, num_tokens, num_output_tokens, token_ids=prompt))
    return sorted(talks + bursts, key=lambda one: one.arrival_s)


class Run(NamedTuple):
    """A run of the load on the real engine, and what steps cost around it."""

    served: list[ServedRequest]
    steps: list[MeasuredStep]
    costs: StepCosts


def judge(
    runs: Sequence[Run], requests: list[TraceRequest], config: EngineConfig, load: LoadSettings
) -> dict[str, Any]:
    """Compare real runs of one load, each with its simulation; figures are medians over the runs."""
    compared = [_compare(run, requests, config, load) for run in runs]
    return {
        "num_requests": len(requests),
        **{name: median(one[name] for one in compared) for name in compared[0]},
        "runs": compared,
    }


def _compare(
    run: Run, requests: list[TraceRequest], config: EngineConfig, load: LoadSettings
) -> dict[str, float]:
    simulated = simulate_serving(requests, config, run.costs, load=load)
    figures = simulated.figures
    simulated_ttft_s = fmean(_ttft_s(one) for one in simulated.requests)
    mean_ttft_s = fmean(_ttft_s(one) for one in run.served)
    duration_s = max(one.finished_ns or 0 for one in run.served) / 1e9
    busy_s = sum(one.took_ns for one in run.steps) / 1e9
    errors = errors_of(run.costs.step, run.steps)
    return {
        "num_steps": len(run.steps),
        "num_simulated_steps": figures.num_steps,
        "median_step_error": median(errors),
        "p90_step_error": percentile(errors, 90),
        "median_change": median(_changes(run.steps)),
        "predicted_steps_total_error": total_error_of(run.costs.step, run.steps),
        "duration_s": duration_s,
        "simulated_duration_s": figures.duration_s,
        "duration_error": figures.duration_s / duration_s - 1,
        "busy_s": busy_s,
        "simulated_busy_s": figures.busy_s,
        "busy_error": figures.busy_s / busy_s - 1,
        "mean_ttft_s": mean_ttft_s,
        "simulated_mean_ttft_s": simulated_ttft_s,
        "ttft_error": simulated_ttft_s / mean_ttft_s - 1,
        "token_hit_rate": sum(one.num_cached_tokens for one in run.served)
        / sum(one.num_prompt_tokens for one in run.served),
        "simulated_token_hit_rate": figures.token_hit_rate,
    }


def _changes(steps: Sequence[MeasuredStep]) -> list[float]:
    """Return by how much a decode of the same sequences took longer or less than the step before it."""
    return [
        abs(after.took_ns / before.took_ns - 1)
        for before, after in pairwise(steps)
        if before.work.num_prefills == after.work.num_prefills == 0
        and before.work.num_seqs == after.work.num_seqs
    ]


def _ttft_s(one: ServedRequest) -> float:
    assert one.first_token_ns is not None, one.error
    return (one.first_token_ns - one.arrival_ns) / 1e9


def choose_loads(
    requests: list[TraceRequest], config: EngineConfig, costs: StepCosts, shares: Sequence[float]
) -> dict[str, LoadSettings]:
    """Return loads as shares of what the engine can serve when all requests come at once, as simulated."""
    at_once = simulate_serving(requests, config, costs, load=LoadSettings(stretch=1e-9)).figures
    longest_s = requests[-1].arrival_s
    return {
        f"{share} of capacity": LoadSettings(stretch=at_once.duration_s / share / longest_s)
        for share in shares
    }


def as_text(found: dict[str, Any]) -> str:
    """Show the fit, then both loads."""
    fit = found["fit"]
    rows = [
        (
            name,
            f"{one['num_requests']:,}",
            f"{one['num_steps']:,.0f} / {one['num_simulated_steps']:,.0f}",
            f"{one['median_step_error']:.1%}",
            f"{one['median_change']:.1%}",
            f"{one['duration_s']:.1f} / {one['simulated_duration_s']:.1f} s",
            f"{one['duration_error']:+.1%}",
            f"{one['busy_error']:+.1%}",
            " … ".join(f"{end(run['mean_ttft_s'] for run in one['runs']):.3f}" for end in (min, max)),
            f"{one['mean_ttft_s']:.3f} / {one['simulated_mean_ttft_s']:.3f} s",
            f"{one['ttft_error']:+.1%}",
        )
        for name, one in found["loads"].items()
    ]
    head = (
        "LOAD", "REQUESTS", "STEPS, SIMULATED", "STEP ERROR", "EQUAL STEPS DIFFER BY",
        "TIME, SIMULATED", "ERROR", "BUSY ERROR", "MEAN TTFT OF RUNS", "MEDIAN, SIMULATED", "ERROR",
    )  # fmt: skip
    return (
        f"the host takes {found['host_step_ns'] / 1e3:.0f} µs between steps, "
        f"{found['host_request_ns'] / 1e3:.0f} µs for each request\n"
        f"{found['model']}: fitted to {fit['num_steps']:,} steps, median error {fit['median_error']:.1%}\n\n"
        + columns(head, rows)
    )


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=EngineConfig().model.name)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--fit-s", type=float, default=60.0, help="seconds of steps that are fitted")
    parser.add_argument("--repeats", type=int, default=5, help="turns of both mixes")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument(
        "--burst-share", type=float, default=0.3, help="share of requests that arrive in bursts"
    )
    parser.add_argument("--scale", type=int, default=24, help="system message: 4 times, turns about 5 times")
    parser.add_argument("--max-len", type=int, default=1500)
    parser.add_argument("--vocab-size", type=int, default=4000)
    parser.add_argument("--num-blocks", type=int, default=4096)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 2.0], help="of the capacity")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    output_flags(parser, "fidelity")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    options = parse()
    runtime = None
    if options.cpu_time:
        if os.environ.get("OMP_NUM_THREADS") != "1":
            sys.exit("--cpu-time needs OMP_NUM_THREADS=1: the CPU time of several threads is not a duration")
        runtime = replace(Runtime.system(seed=0), clock=CPUClock())
    config = EngineConfig().with_values(
        {"model.name": options.model, "model.dtype": options.dtype, "kv.num_blocks": options.num_blocks}
    )
    requests = judged_load(options)
    reals: list[tuple[str, list[ServedRequest], list[MeasuredStep]]] = []
    parts: list[list[MeasuredStep]] = []  # of the fitted mix: one before each run of a load, and one more
    part_ns = round(options.fit_s * 1e9 / (options.repeats * len(options.loads) + 1))
    with RecordedCore(config, runtime) as recorded:
        rounds, clock = recorded.rounds(FitSettings(seed=options.seed)), recorded.clock
        next(rounds)

        def measure_part() -> None:
            part: list[MeasuredStep] = []
            end_ns = clock.now_ns() + part_ns
            while clock.now_ns() < end_ns:
                part += next(rounds)
            parts.append(part)

        measure_part()
        first, _ = fit_steps(parts[0], recorded.costs())
        loads = choose_loads(requests, config, first, options.loads)
        for name in [*loads] * options.repeats:
            with RecordedCore(config, runtime) as fresh:
                reals.append((name, *fresh.run(requests, loads[name])))
            measure_part()
        bare = recorded.costs()
    costs, fit = fit_steps([step for part in parts for step in part], bare)
    runs: dict[str, list[Run]] = {name: [] for name in loads}
    for (name, served, steps), before, after in zip(reals, parts, parts[1:], strict=False):
        runs[name].append(Run(served, steps, fit_steps(before + after, bare)[0]))
    judged = {name: judge(runs[name], requests, config, load) for name, load in loads.items()}
    host = {"host_step_ns": costs.host_step_ns, "host_request_ns": costs.host_request_ns}
    found = {"model": options.model, "fit": asdict(fit), **host, "loads": judged}
    settings = {name: str(value) for name, value in vars(options).items() if name not in ("save", "json")}
    publish(
        "fidelity",
        as_text(found),
        options,
        clock="CPU time of one thread" if options.cpu_time else "wall",
        foreign_cores=foreign_cores(),
        settings=settings,
        **found,
    )


if __name__ == "__main__":
    main()
