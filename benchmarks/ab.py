"""How often `sage llm ab` is wrong: `python benchmarks/ab.py`, on virtual time.

A simulation is deterministic, so two equal configurations differ in no request, which proves nothing. These
differ in each, but not in distribution: an order of admission is random, and so are two eviction policies
(one within a second of last use, one to the end), with one seed against another. Loads are drawn anew: whole
conversations of a recorded trace, with replacement, in new order, at new Poisson arrivals. All loads are
simulated, none is resampled from another's outcomes.

1. `null`: seed 1 against seed 2 on each load, under queueing (`chat`, `azure`) and in the cache alone. How
   often an interval of 95 % excludes 0, for each metric.
2. `planted`: steps that take 1.02 times as long against such that do not: with the same seed, as `ab` pairs
   runs, and with another. How often an interval excludes 0, and how often it holds the truth, which is that
   of all loads together.
3. `rules`: other intervals and lengths of blocks.

A choice is flattered by the loads that it was made on. What `ab` computes was chosen by loads 0 to 99, on
which 2 and 3 are (named so); 1 is on those and, by itself, on others, from load 100 on.

Outcomes are kept in `--outcomes FILE`, so that a study can be made in parts: what the file lacks is
simulated, and `--seconds S` stops after a while.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import log1p
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
from common import output_flags, publish

from sagellm.core import CachedNode, PluginRegistry, Provider, StepCost, TraceRequest, hookimpl
from sagellm.core.protocols.scheduler_ir import ScheduleIR, SchedulerPassProtocol
from sagellm.engines import EngineConfig
from sagellm.engines.cli.output import columns
from sagellm.kvmgr.eviction.ranked import RankedEvictionPolicy
from sagellm.kvmgr.scheduler_ir.passes.ordering import by, order_pending
from sagellm.lab.ab.bootstrap import BlockBootstrap, Estimate, num_requests_for, sessions_of, student_t
from sagellm.lab.ab.comparison import Run, compare
from sagellm.lab.ab.metrics import CACHE_METRICS, SERVING_METRICS, Metric
from sagellm.lab.ab.run import Rows, serving_result
from sagellm.lab.simulation.replay import CacheReplay
from sagellm.lab.simulation.serving import simulate_serving
from sagellm.lab.simulation.serving_figures import ServingLimits
from sagellm.lab.simulation.step_costs import StepCosts, read_step_costs
from sagellm.lab.traces import read_trace

FOLDER = Path(__file__).parent
COST = FOLDER / "cost" / "h200-8b.json"
PLANTED = 1.02
MAX_OUTPUT = 60
"""Requests with longer outputs are left out of the pools: they cost steps and show nothing more."""

LIMITS = ServingLimits(ttft_s=0.2, ttft_prefills=2.0)
SIZE = 300
NUM_CHOOSING = 100
"""The first loads: what `ab` computes was chosen by them, so others judge it."""

PLANTED_IN = (("chat", SIZE, 1), ("azure", 100, 1), ("azure", SIZE, 1), ("azure", SIZE, 2))
"""Load, number of requests, and the seed of the slower run; that of the other is 1."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of load: a trace, how many begin a second, and the engine that serves it."""

    trace: str
    rate: float
    settings: dict[str, Any]


def cached(policy: str) -> dict[str, Any]:
    """Return the settings of a small cache with a random eviction policy."""
    return {"kv.num_blocks": 60, "prefix_cache.eviction_policy": policy}


KINDS = {
    "blurred cache": Kind(trace="embedded_chat.jsonl.xz", rate=22.0, settings=cached("blurred")),
    "stubborn cache": Kind(trace="embedded_chat.jsonl.xz", rate=22.0, settings=cached("stubborn")),
    "chat": Kind(trace="embedded_chat.jsonl.xz", rate=22.0, settings={"scheduler.max_num_seqs": 4}),
    "azure": Kind(trace="azure_conv.csv.xz", rate=11.0, settings={"scheduler.max_num_seqs": 64}),
}

SERVED = ("chat", "azure")
"""Kinds of load that are served; the others are replayed through the cache alone."""


@dataclass(frozen=True)
class RandomOrder(SchedulerPassProtocol):
    """Admits in an order that the seed draws, the same for a request in every step."""

    name = "random-order"
    seed: int = 0

    def run(self, ir: ScheduleIR) -> ScheduleIR:
        """Order by a hash of the seed and the time of arrival."""
        if not ir.can_admit or len(ir.pending) < 2:
            return ir
        bits = ir.pending.arrived_time.astype(np.float64).view(np.uint64) ^ np.uint64(
            self.seed * 0x9E3779B97F4A7C15 % 2**64
        )
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return order_pending(ir, by(bits ^ (bits >> np.uint64(31)), ir.admission))


class BlurredEviction(RankedEvictionPolicy):
    """Evicts by last use, to the second; within one the seed draws the order."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._seed = seed

    def node_key(self, node: CachedNode) -> float:
        """Return the second of the last use, and a fraction that the seed and the node decide."""
        return node.last_access_ns // 1_000_000_000 + self._fraction(node)

    def _fraction(self, node: CachedNode) -> float:
        return Random(f"{self._seed} {node.node_id} {node.last_access_ns}").random()


class StubbornEviction(BlurredEviction):
    """Evicts in an order that the seed draws, however long ago: what it keeps, it keeps to the end.

    So what the first prompts happen to leave decides what a whole trace saves.
    """

    def node_key(self, node: CachedNode) -> float:
        """Return a number that the seed and the node decide."""
        return self._fraction(node)


class Plugin:
    """Offers the random pass and both random policies to the registry."""

    @hookimpl
    def sagellm_providers(self) -> list[Provider]:
        """Name them."""
        return [
            Provider("scheduler_pass", "random-order", "ab:RandomOrder", "in random order"),
            Provider("eviction_policy", "stubborn", "ab:StubbornEviction", "at random, once and for all"),
            Provider("eviction_policy", "blurred", "ab:BlurredEviction", "by last use, to the second"),
        ]


@cache
def registry() -> PluginRegistry:
    """Return what is installed, and what `Plugin` offers."""
    found = PluginRegistry.load()
    found.register(Plugin(), distribution="benchmarks")
    return found


@cache
def pool(trace: str) -> list[list[TraceRequest]]:
    """Return the conversations of a trace."""
    found: dict[str, list[TraceRequest]] = {}
    for index, one in enumerate(read_trace(FOLDER / "traces" / trace)):
        if one.num_output_tokens <= MAX_OUTPUT:
            found.setdefault(one.conversation or f"request {index}", []).append(one)
    return list(found.values())


@cache
def load_of(name: str, seed: int, size: int) -> list[TraceRequest]:
    """Draw conversations with replacement until there are so many requests; each keeps its own pace."""
    kind = KINDS[name]
    random, made, now_s = Random(f"{kind.trace} {seed}"), list[TraceRequest](), 0.0
    while len(made) < 1.3 * size:
        now_s += random.expovariate(kind.rate)
        turns = random.choice(pool(kind.trace))
        for one in turns:
            arrival_s = now_s + one.arrival_s - turns[0].arrival_s
            made.append(replace(one, arrival_s=arrival_s, conversation=str(now_s)))
    return sorted(made, key=lambda one: one.arrival_s)[:size]


class Job(NamedTuple):
    """One simulation: of a load, with a seed, and steps so many times as long."""

    kind: str
    load: int
    size: int
    seed: int
    factor: float


def slower(costs: StepCosts, factor: float) -> StepCosts:
    """Return costs of which each is so many times as high."""
    step = StepCost(**{name: factor * value for name, value in vars(costs.step).items()})
    return replace(costs, step=step)


def simulate(job: Job) -> tuple[Job, Rows]:
    """Run one job."""
    kind, requests = KINDS[job.kind], load_of(job.kind, job.load, job.size)
    values: dict[str, Any] = {"predictor.name": "null", "kv.num_blocks": 20_000, **kind.settings}
    if job.kind not in SERVED:
        policy = values["prefix_cache.eviction_policy"]
        values["prefix_cache.eviction_policy"] = f"{policy}{{seed={job.seed}}}"
        replayed = list(CacheReplay(EngineConfig().with_values(values), registry()).run(requests))
        saved: list[float | None] = [one.num_saved_tokens for one in replayed]
        return job, {"saved": saved, "prompt": [one.num_prompt_tokens for one in requests]}
    values["scheduler.passes"] = f"order=random-order{{seed={job.seed}}},share=none"
    costs = slower(read_step_costs(COST), job.factor)
    done = simulate_serving(
        requests, EngineConfig().with_values(values), costs, limits=LIMITS, registry=registry()
    )
    return job, serving_result(done.requests, LIMITS, read_step_costs(COST).prefill_ns).rows


def null_jobs(loads: range, kinds: Iterable[str] = KINDS) -> Iterator[Job]:
    """Yield the simulations of equal configurations, load by load."""
    for load, kind, seed in product(loads, kinds, (1, 2)):
        yield Job(kind, load, SIZE, seed, 1.0)


def planted_jobs(loads: range) -> Iterator[Job]:
    """Yield the simulations of slower steps, and those beside them that `null_jobs` lacks."""
    for load, (kind, size, seed) in product(loads, PLANTED_IN):
        yield Job(kind, load, size, seed, PLANTED)
        if size != SIZE:
            yield Job(kind, load, size, 1, 1.0)


Outcomes = dict[Job, Rows]


class Loads(NamedTuple):
    """Which loads judge equal configurations, and by which the interval was chosen."""

    judging: range
    choosing: range

    @classmethod
    def of(cls, options: argparse.Namespace) -> Loads:
        """Choose as the flags say."""
        return cls(
            range(NUM_CHOOSING, NUM_CHOOSING + options.judging), range(min(options.choosing, NUM_CHOOSING))
        )

    def jobs(self) -> Iterator[Job]:
        """Yield all simulations of the study."""
        yield from null_jobs(self.judging)
        yield from null_jobs(self.choosing, SERVED)
        yield from planted_jobs(self.choosing)


def simulate_all(options: argparse.Namespace) -> Outcomes:
    """Simulate what the file lacks, and keep it there; return everything."""
    found: Outcomes = {}
    if options.outcomes.exists():
        for line in options.outcomes.read_text(encoding="utf-8").splitlines():
            job, rows = json.loads(line)
            found[Job(*job)] = rows
    missing = [job for job in Loads.of(options).jobs() if job not in found]
    end_s = time.monotonic() + options.seconds
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.processes) as workers, options.outcomes.open("a", encoding="utf-8") as file:
        for job, rows in workers.imap_unordered(simulate, missing, chunksize=2):
            found[job] = rows
            file.write(json.dumps([job, rows]) + "\n")
            if time.monotonic() > end_s:
                workers.terminate()
                break
    return found


def run_of(outcomes: Outcomes, job: Job) -> Run:
    """Return a simulation as `ab` sees it."""
    rows = {name: np.array(values, np.float64) for name, values in outcomes[job].items()}
    return Run(name=str(job.seed), text="", columns=rows)


def bootstrap_of(job: Job) -> BlockBootstrap:
    """Return the resamples of a load; their seed is the load's."""
    return BlockBootstrap(sessions_of(load_of(job.kind, job.load, job.size)), seed=job.load)


def intervals(outcomes: Outcomes, a: Job, b: Job, metrics: tuple[Metric, ...]) -> dict[str, Estimate]:
    """Return what `ab` would say of each metric."""
    found = compare(run_of(outcomes, a), run_of(outcomes, b), metrics, bootstrap_of(a))
    return {each.metric.name: each.shown for each in found.changes if each.shown is not None}


def share(values: list[bool]) -> float:
    """Return the share of true ones, in percent."""
    return round(100 * sum(values) / len(values), 1)


def judge_null(outcomes: Outcomes, loads: range, kinds: tuple[str, ...]) -> list[dict[str, Any]]:
    """Count false alarms of seed 1 against seed 2."""
    rows = []
    for kind in kinds:
        metrics = SERVING_METRICS if kind in SERVED else CACHE_METRICS
        found = [
            intervals(outcomes, Job(kind, load, SIZE, 1, 1.0), Job(kind, load, SIZE, 2, 1.0), metrics)
            for load in loads
        ]
        for metric in metrics:
            own = [one[metric.name] for one in found if metric.name in one]
            if any(each.value for each in own):
                rows.append(
                    {
                        "load": kind,
                        "metric": metric.name,
                        "num_loads": len(own),
                        "no_difference_percent": share([not each.is_clear for each in own]),
                        "half_width_percent": _percent(np.median([each.high - each.low for each in own]) / 2),
                        "spread_percent": _percent(np.std([each.value for each in own])),
                    }
                )
    return rows


def judge_planted(outcomes: Outcomes, loads: range) -> list[dict[str, Any]]:
    """Count how often longer steps are found in mean TTFT, and how often the interval holds the truth."""
    rows = []
    metrics = [each for each in SERVING_METRICS if each.name in ("ttft", "tpot", "latency")]
    for (kind, size, other), metric in product(PLANTED_IN, metrics):
        pairs = [(Job(kind, load, size, 1, 1.0), Job(kind, load, size, other, PLANTED)) for load in loads]
        truth = _truth(outcomes, pairs, metric)
        found = [intervals(outcomes, a, b, (metric,))[metric.name] for a, b in pairs]
        rows.append(
            {
                "load": kind,
                "num_requests": size,
                "seed": "the same" if other == 1 else "another",
                "metric": metric.name,
                "num_loads": len(found),
                "truth_percent": _percent(truth),
                "found_percent": share([each.low > 0 for each in found]),
                "covered_percent": share([each.low <= truth <= each.high for each in found]),
                "half_width_percent": _percent(np.median([each.high - each.low for each in found]) / 2),
                "num_requests_for_it": int(
                    np.median([num_requests_for(log1p(truth), each, size) for each in found])
                ),
            }
        )
    return rows


def _truth(outcomes: Outcomes, pairs: list[tuple[Job, Job]], metric: Metric) -> float:
    """Return the relative difference of all loads together."""
    a, b = (
        sum(float(np.nansum(run_of(outcomes, pair[side]).columns[metric.column])) for pair in pairs)
        for side in (0, 1)
    )
    return b / a - 1


def _percent(value: Any) -> float:
    return round(100 * float(value), 2)


RULES = {
    "each request alone": None,
    "each session alone": lambda num: 1,
    "blocks of ∛n sessions": lambda num: round(num ** (1 / 3)),
    "blocks of √n sessions": lambda num: round(num**0.5),
    "blocks of n ÷ 10 sessions": lambda num: round(num / 10),
}
"""Lengths of blocks by the number of sessions; None resamples requests."""

INTERVALS = ("percentile", "studentized", "symmetric studentized", "Student's t")
NUM_RESAMPLES = 1000


def judge_rules(outcomes: Outcomes, loads: range) -> list[dict[str, Any]]:
    """Compare intervals of mean TTFT's relative difference, without one and with the planted one."""
    rows = []
    for kind, (case, seed, factor) in product(SERVED, (("none", 2, 1.0), ("planted", 1, PLANTED))):
        pairs = [(Job(kind, load, SIZE, 1, 1.0), Job(kind, load, SIZE, seed, factor)) for load in loads]
        truth = 0.0 if case == "none" else float(np.log1p(_truth(outcomes, pairs, SERVING_METRICS[0])))
        for blocks, rule in RULES.items():
            found = [_other_intervals(outcomes, a, b, rule) for a, b in pairs]
            for interval in INTERVALS:
                own = [each[interval] for each in found]
                rows.append(
                    {
                        "load": kind,
                        "difference": case,
                        "resampled": blocks,
                        "interval": interval,
                        "covered_percent": share([low <= truth <= high for low, high in own]),
                        "half_width_percent": _percent(np.median([high - low for low, high in own]) / 2),
                    }
                )
    return rows


def _other_intervals(outcomes: Outcomes, a: Job, b: Job, rule: Any) -> dict[str, tuple[float, float]]:
    sessions = sessions_of(load_of(a.kind, a.load, a.size))
    sessions = np.arange(a.size) if rule is None else sessions
    columns = [np.nan_to_num(run_of(outcomes, job).columns["ttft_s"]) for job in (a, b)]
    sums = np.stack([np.bincount(sessions, each) for each in columns], axis=1)
    length = 1 if rule is None else max(1, rule(len(sums)))
    num_blocks = round(len(sums) / length)
    total = np.cumsum(np.concatenate([np.zeros((1, 2)), sums, sums[: length - 1]]), axis=0)
    blocks = total[length:] - total[:-length]
    starts = np.random.default_rng(a.load).integers(0, len(sums), (NUM_RESAMPLES, num_blocks))
    drawn = blocks[starts]  # (resamples, blocks, 2)
    values, errors = _log_ratio(drawn)
    (value,), (error,) = _log_ratio(blocks[None])
    error *= (len(blocks) / num_blocks) ** 0.5
    t = (values - value) / np.maximum(errors, 1e-12)
    low, high = np.quantile(t, [0.025, 0.975])
    reach = np.quantile(np.abs(t), 0.95) * error
    times = student_t(0.95, num_blocks - 1) * (num_blocks / (num_blocks - 1)) ** 0.5
    ends = np.quantile(values, [0.025, 0.975])
    return {
        "percentile": (float(ends[0]), float(ends[1])),
        "studentized": (value - high * error, value - low * error),
        "symmetric studentized": (value - reach, value + reach),
        "Student's t": (value - times * error, value + times * error),
    }


def _log_ratio(blocks: Any) -> tuple[Any, Any]:
    """Return log Σ b ÷ Σ a of rows of blocks, and its standard error."""
    sums = blocks.sum(axis=1)
    residuals = blocks[:, :, 1] / sums[:, None, 1] - blocks[:, :, 0] / sums[:, None, 0]
    return np.log(sums[:, 1] / sums[:, 0]), np.sqrt((residuals**2).sum(axis=1))


def text_of(parts: dict[str, list[dict[str, Any]]]) -> str:
    """Write the tables."""
    return "\n\n".join(
        columns(tuple(rows[0]), [tuple(map(str, row.values())) for row in rows]) for rows in parts.values()
    )


def main() -> None:
    """Simulate, judge, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--judging", type=int, default=100, help="loads that judge; default: %(default)s")
    parser.add_argument("--choosing", type=int, default=100, help="loads that chose; default: %(default)s")
    parser.add_argument(
        "--outcomes", type=Path, default=Path("ab-outcomes.jsonl"), help="default: %(default)s"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop simulating after these")
    parser.add_argument("--processes", type=int, default=2, help="default: %(default)s")
    output_flags(parser, "ab")
    options = parser.parse_args()
    outcomes = simulate_all(options)
    loads = Loads.of(options)
    num_missing = sum(job not in outcomes for job in loads.jobs())
    if num_missing:
        print(f"{num_missing} simulations are missing; run it again")
        return
    parts = {
        "null": judge_null(outcomes, loads.judging, tuple(KINDS)),
        "null_choosing": judge_null(outcomes, loads.choosing, SERVED),
        "planted_choosing": judge_planted(outcomes, loads.choosing),
        "rules_choosing": judge_rules(outcomes, loads.choosing),
    }
    publish("ab", text_of(parts), options, factor=PLANTED, **parts)


if __name__ == "__main__":
    main()
