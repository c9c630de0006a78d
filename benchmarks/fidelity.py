"""How well the cost model predicts the engine: `python benchmarks/fidelity.py [MODEL]`.

Steps of one mix are measured on the real engine and fitted (as `sage llm bench fit` does). Another load, with
conversations that share prefixes and begin as a Poisson process, then runs on the real engine, and once more
on virtual time with the fitted costs: each real step is predicted, and the simulated run's total time is
compared with the real one's. Two rates: one that leaves the engine idle at times, one above its capacity
(requests a second when all come at once, as simulated).

With --cpu-time, one thread computes and the clock is the process's CPU time, so that other processes
of a shared machine count less; idle time is skipped on both sides.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict, replace
from statistics import fmean, median
from time import process_time_ns, time
from typing import Any

from common import foreign_cores, output_flags, publish

from sagellm.core import Clock, Runtime, TraceRequest, percentile
from sagellm.engines import EngineConfig
from sagellm.engines.bench.step_fit import (
    FitSettings,
    errors_of,
    fit_steps,
    load_recorded_core,
    measure_steps,
    total_error_of,
)
from sagellm.engines.cli.output import columns
from sagellm.engines.simulation.conversations import ConversationSettings, simulate_clients
from sagellm.engines.simulation.served_load import LoadRun, LoadSettings, ServedRequest
from sagellm.engines.simulation.serving import simulate_serving
from sagellm.engines.simulation.step_costs import StepCosts
from sagellm.engines.traces.lengths import Lengths


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
    """Make conversations of several turns behind one system message, unlike the mix that is fitted."""
    settings = ConversationSettings(
        num_requests=options.requests,
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
    return [
        one for one in simulate_clients(settings) if one.num_prompt_tokens + one.num_output_tokens <= most
    ]


def run_real(
    requests: list[TraceRequest], config: EngineConfig, load: LoadSettings, runtime: Runtime | None
) -> tuple[list[ServedRequest], list[Any]]:
    """Run a load on the real engine; return its requests and its steps."""
    core, recorder, used = load_recorded_core(config, runtime)
    for _ in range(2):  # the first run finds memory cold
        core.kv.clear_cache()
        recorder.steps.clear()
        served = LoadRun(core, used.clock, requests, load).run()
    core.close()
    return served, recorder.steps


def judge(
    requests: list[TraceRequest],
    config: EngineConfig,
    load: LoadSettings,
    costs: StepCosts,
    runtime: Runtime | None,
) -> dict[str, Any]:
    """Compare a real run with its simulation."""
    served, steps = run_real(requests, config, load, runtime)
    simulated = simulate_serving(requests, config, costs, load=load)
    errors = errors_of(costs.step, steps)
    real_s = max(one.finished_ns or 0 for one in served) / 1e9
    real_busy_s = sum(one.took_ns for one in steps) / 1e9
    figures = simulated.figures
    return {
        "num_requests": len(requests),
        "num_steps": len(steps),
        "num_simulated_steps": figures.num_steps,
        "median_step_error": median(errors),
        "p90_step_error": percentile(errors, 90),
        "predicted_steps_total_error": total_error_of(costs.step, steps),
        "duration_s": real_s,
        "simulated_duration_s": figures.duration_s,
        "duration_error": figures.duration_s / real_s - 1,
        "busy_s": real_busy_s,
        "simulated_busy_s": figures.busy_s,
        "busy_error": figures.busy_s / real_busy_s - 1,
        "mean_ttft_s": fmean(_ttft_s(one) for one in served),
        "simulated_mean_ttft_s": fmean(_ttft_s(one) for one in simulated.requests),
        "token_hit_rate": sum(one.num_cached_tokens for one in served)
        / sum(one.num_prompt_tokens for one in served),
        "simulated_token_hit_rate": figures.token_hit_rate,
    }


def _ttft_s(one: ServedRequest) -> float:
    assert one.first_token_ns is not None, one.error
    return (one.first_token_ns - one.arrival_ns) / 1e9


def as_text(found: dict[str, Any]) -> str:
    """Show the fit, then both loads."""
    fit = found["fit"]
    rows = [
        (
            name,
            f"{one['num_requests']:,}",
            f"{one['num_steps']:,} / {one['num_simulated_steps']:,}",
            f"{one['median_step_error']:.1%}",
            f"{one['duration_s']:.1f} / {one['simulated_duration_s']:.1f} s",
            f"{one['duration_error']:+.1%}",
            f"{one['busy_error']:+.1%}",
            f"{one['mean_ttft_s']:.3f} / {one['simulated_mean_ttft_s']:.3f} s",
        )
        for name, one in found["loads"].items()
    ]
    head = (
        "LOAD", "REQUESTS", "STEPS, SIMULATED", "STEP ERROR", "TIME, SIMULATED", "ERROR", "BUSY ERROR",
        "MEAN TTFT, SIMULATED",
    )  # fmt: skip
    return (
        f"{found['model']}: fitted to {fit['num_steps']:,} steps, median error {fit['median_error']:.1%}\n\n"
        + columns(head, rows)
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=EngineConfig().model.name)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--fit-s", type=float, default=60.0, help="seconds of steps that are fitted")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--scale", type=int, default=24, help="system message: 4 times, turns about 5 times")
    parser.add_argument("--max-len", type=int, default=1500)
    parser.add_argument("--vocab-size", type=int, default=4000)
    parser.add_argument("--num-blocks", type=int, default=4096)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 2.0], help="of the capacity")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    output_flags(parser, "fidelity")
    options = parser.parse_args()
    runtime = None
    if options.cpu_time:
        if os.environ.get("OMP_NUM_THREADS") != "1":
            sys.exit("--cpu-time needs OMP_NUM_THREADS=1: the CPU time of several threads is no duration")
        runtime = replace(Runtime.system(seed=0), clock=CPUClock())
    config = EngineConfig().with_values(
        {"model.name": options.model, "model.dtype": options.dtype, "kv.num_blocks": options.num_blocks}
    )
    settings = FitSettings(duration_s=options.fit_s, seed=options.seed)
    steps, bare = measure_steps(config, settings, runtime=runtime)
    costs, fit = fit_steps(steps, bare)
    requests = judged_load(options)
    at_once = simulate_serving(requests, config, costs, load=LoadSettings(stretch=1e-9)).figures
    longest_s = requests[-1].arrival_s
    loads = {
        f"{share} of capacity": judge(
            requests, config, LoadSettings(stretch=at_once.duration_s / share / longest_s), costs, runtime
        )
        for share in options.loads
    }
    found = {"model": options.model, "fit": asdict(fit), "loads": loads}
    publish(
        "fidelity",
        as_text(found),
        options,
        clock="CPU time of one thread" if options.cpu_time else "wall",
        foreign_cores=foreign_cores(),
        **found,
    )


if __name__ == "__main__":
    main()
