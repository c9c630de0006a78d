"""A comparison from its plan to its verdicts: which processes run, and what is made of their results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Seq
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from sagellm.core import ConfigError, TraceRequest
from sagellm.engines.progress import Advance
from sagellm.lab.ab.bootstrap import BlockBootstrap, sessions_of
from sagellm.lab.ab.comparison import Change, Comparison, Run, change_of, compare
from sagellm.lab.ab.metrics import CACHE_METRICS, SAVED, SERVING_METRICS, Metric, headline_of
from sagellm.lab.ab.processes import run_jobs
from sagellm.lab.ab.run import Job, Mode, Result
from sagellm.lab.ab.variants import DEFAULT, Variant, read_variant
from sagellm.lab.ab.words import verdict
from sagellm.lab.bench.errors import BenchmarkError
from sagellm.lab.simulation.served_load import LoadSettings
from sagellm.lab.simulation.serving_figures import ServingLimits
from sagellm.lab.simulation.step_costs import StepCosts

LEVEL = 0.95
"""Of all intervals of one metric together: with k variants beside `a`, each has 1 − 0.05 ÷ k (Bonferroni)."""

_FAR_TIMES, _FAR_SHARE = 1.5, 0.05
"""From which distance on `a` is not the server whose trace it is."""

_MAX_BLOCKS = 1 << 24
"""More would fill the memory of this machine, and no trace fills them."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """The trace that all runs read."""

    path: Path
    requests: Seq[TraceRequest] = field(repr=False)
    reader: str | None = None
    limit: int | None = None


@dataclass(frozen=True, kw_only=True)
class Serving:
    """How serving is simulated."""

    cost: Path
    costs: StepCosts
    load: LoadSettings
    limits: ServingLimits


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A run to make. A bound is not a candidate: nobody can serve with it, or nobody would."""

    name: str
    text: str
    job: Job
    policies: str = ""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is compared, on what; `serving` is None for the cache alone."""

    source: Source
    variants: list[Variant]
    serving: Serving | None
    headline: Metric
    planned: list[Planned]
    bounds: list[Planned]
    without: list[str]  # why a bound is missing
    has_assumed_blocks: bool = (
        False  # nobody said how many there are, so `a` has what the costs' memory holds
    )

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The metrics that are compared."""
        return CACHE_METRICS if self.serving is None else SERVING_METRICS

    @property
    def num_requests_to_run(self) -> int:
        """The requests of all runs."""
        return len(self.source.requests) * (len(self.planned) + len(self.bounds))


@dataclass(frozen=True, kw_only=True)
class Study:
    """What a comparison found; `a` is what the others are compared with."""

    plan: Plan
    a: Run
    comparisons: list[Comparison]
    verdicts: list[str]
    bounds: list[Run]
    bootstrap: BlockBootstrap
    recorded: list[Change] = field(default_factory=list)  # from what the trace recorded to what `a` had

    @property
    def is_as_recorded(self) -> bool:
        """Whether `a` comes near to what was recorded; a load that is stretched need not."""
        serving = self.plan.serving
        is_stretched = serving is not None and serving.load.stretch != 1
        return is_stretched or not any(_is_far(each) for each in self.recorded)

    @property
    def runs(self) -> list[Run]:
        """Those under comparison, `a` first."""
        return [self.a, *(each.run for each in self.comparisons)]

    def as_json(self) -> dict[str, Any]:
        """Return figures, differences and verdicts as plain values."""
        plan, bootstrap = self.plan, self.bootstrap
        return {
            "trace": str(plan.source.path),
            "num_requests": len(plan.source.requests),
            "num_sessions": bootstrap.num_sessions,
            "cost": None if plan.serving is None else plan.serving.costs.source,
            "headline": plan.headline.name,
            "interval": {
                "level": LEVEL,
                "level_of_each": bootstrap.level,
                "block_sessions": bootstrap.block_len,
            },
            "runs": [_run_json(each, plan.metrics) for each in self.runs],
            "bounds": [_run_json(each, plan.metrics) for each in self.bounds],
            "without": plan.without,
            "recorded": {each.metric.name: each.a for each in self.recorded},
            "is_as_recorded": self.is_as_recorded,
            "comparisons": [
                {
                    "a": self.a.name,
                    "b": each.run.name,
                    "verdict": sentence,
                    "is_identical": each.is_identical,
                    "is_same_configuration": each.is_same_configuration,
                    "changes": {
                        change.metric.name: {"a": change.a, "b": change.b, **asdict(change.difference)}
                        for change in each.changes
                    },
                }
                for each, sentence in zip(self.comparisons, self.verdicts, strict=True)
            ],
        }


def make_plan(
    source: Source,
    variants: list[Variant],
    serving: Serving | None,
    *,
    headline: str | None = None,
    with_bounds: bool = True,
) -> Plan:
    """Plan the runs of variants, the first of which is `a`. Raises ConfigError for what cannot be run."""
    mode: Mode = "cache" if serving is None else "serving"
    metrics = CACHE_METRICS if serving is None else SERVING_METRICS
    has_content = all(len(one.token_ids) or one.block_ids for one in source.requests)
    if serving is None and not has_content:
        raise ConfigError(
            f"the trace {source.path} has requests of which only lengths are known, so there is nothing to "
            "reuse; compare serving with --cost FILE"
        )
    has_assumed_blocks = not variants[0].config.kv.num_blocks
    variants = [_with_blocks(each, serving) for each in variants]
    without: list[str] = []
    bounds: list[Planned] = []
    if with_bounds:
        if serving is not None:
            bounds += _serving_bounds(source, variants[0], serving)
        if not variants[0].config.prefix_cache.enabled:
            without.append("no optimal eviction: a has no prefix cache")
        elif not has_content:
            without.append("no optimal eviction: the trace knows only the lengths of prompts")
        else:
            bounds += _cache_bounds(source, variants[0], serving)
    return Plan(
        source=source,
        variants=variants,
        serving=serving,
        headline=headline_of(headline, metrics),
        planned=[
            Planned(
                name=each.name,
                text=each.text,
                job=_job(source, each, serving, mode),
                policies=each.policies(is_served=serving is not None) if each.text == DEFAULT else "",
            )
            for each in variants
        ],
        bounds=bounds,
        without=without,
        has_assumed_blocks=has_assumed_blocks,
    )


def run_study(plan: Plan, num_processes: int, advance: Advance) -> Study:
    """Run a plan and compare. Raises what the first failing run raised, and BenchmarkError for a run of which
    every request failed.
    """
    everything = [*plan.planned, *plan.bounds]
    results = run_jobs([each.job for each in everything], num_processes, advance)
    runs = [_run(each, result) for each, result in zip(everything, results, strict=True)]
    for run in runs[: len(plan.planned)]:
        if run.num_failed == len(plan.source.requests):
            raise BenchmarkError(f"{run.name}: all {run.num_failed:,} requests failed: {run.error}")
    return conclude(plan, runs[: len(plan.planned)], runs[len(plan.planned) :])


def conclude(plan: Plan, runs: list[Run], bounds: list[Run]) -> Study:
    """Compare the first run with each other one."""
    a, *others = runs
    level = 1 - (1 - LEVEL) / len(others)
    bootstrap = BlockBootstrap(sessions_of(plan.source.requests), level=level)
    comparisons = [
        compare(a, b, plan.metrics, bootstrap, is_same=variant.is_same_as(plan.variants[0]))
        for b, variant in zip(others, plan.variants[1:], strict=True)
    ]
    num_requests = len(plan.source.requests)
    return Study(
        plan=plan,
        a=a,
        comparisons=comparisons,
        verdicts=[verdict(each, plan.headline, bootstrap, num_requests) for each in comparisons],
        bounds=bounds,
        bootstrap=bootstrap,
        recorded=_recorded(plan.source.requests, a, bootstrap),
    )


def _recorded(requests: Seq[TraceRequest], a: Run, bootstrap: BlockBootstrap) -> list[Change]:
    rows = {
        "ttft_s": [one.ttft_s for one in requests],
        "saved": [one.num_cached_tokens for one in requests],
        "prompt": [one.num_prompt_tokens for one in requests],
    }
    columns = {name: np.array(values, np.float64) for name, values in rows.items()}
    recorded = Run(name="recorded", text="", columns=columns)
    metrics = (one for one in (SERVING_METRICS[0], SAVED) if one.column in a.columns)
    changes = (change_of(recorded, a, metric, bootstrap) for metric in metrics)
    return [each for each in changes if each.a is not None]


def _is_far(change: Change) -> bool:
    assert change.a is not None, "it was recorded"
    assert change.b is not None, "and simulated"
    if change.metric.is_share:
        return abs(change.b - change.a) > _FAR_SHARE
    return not change.a / _FAR_TIMES <= change.b <= change.a * _FAR_TIMES


def _with_blocks(variant: Variant, serving: Serving | None) -> Variant:
    """Say how many blocks there are where the costs do, so that bounds have as many."""
    kv = variant.config.kv
    num_blocks = kv.num_blocks or (serving and serving.costs.num_blocks(kv.block_size))
    if not num_blocks:
        raise ConfigError(
            f"{variant.name}: how many blocks of KV are there? Say so with --num-blocks"
            + ("" if serving is None else ", or with kv_bytes_per_token and kv_memory_bytes in the costs")
        )
    if num_blocks > _MAX_BLOCKS:
        raise ConfigError(
            f"{variant.name}: kv.num_blocks is {num_blocks:,}; at most {_MAX_BLOCKS:,} are simulated"
        )
    return replace(variant, config=variant.config.with_values({"kv.num_blocks": num_blocks}))


def _serving_bounds(source: Source, a: Variant, serving: Serving) -> Iterator[Planned]:
    for name, text in (
        ("exact lengths", "predictor=exact"),
        ("in order of arrival", "order=none,share=none"),
    ):
        variant = read_variant(name, text, a.config, oracle_error=a.oracle_error)
        if not variant.is_same_as(a):
            yield Planned(name=name, text=text, job=_job(source, variant, serving, "serving"))


def _cache_bounds(source: Source, a: Variant, serving: Serving | None) -> Iterator[Planned]:
    """Yield replays of the cache alone. In serving the optimum is not a bound: what is evicted decides when
    requests run, and so which ones come first.
    """
    alone = "" if serving is None else ", cache alone"
    yield Planned(
        name=f"optimal eviction{alone}", text="Belady's policy", job=_job(source, a, None, "belady")
    )
    yield Planned(name=f"no eviction{alone}", text="room for all", job=_job(source, a, None, "unlimited"))


def _job(source: Source, variant: Variant, serving: Serving | None, mode: Mode) -> Job:
    job = Job(
        name=variant.name,
        trace=str(source.path),
        reader=source.reader,
        limit=source.limit,
        config=variant.config.with_values({"scheduler.print": "none"}).values(),
        mode=mode,
        oracle_error=variant.oracle_error,
    )
    if serving is None:
        return job
    load, limits = asdict(serving.load), asdict(serving.limits)
    load.pop("stop_token_ids")
    return replace(job, cost=str(serving.cost), load=load, limits=limits)


def _run(planned: Planned, result: Result) -> Run:
    return Run(
        name=planned.name,
        text=planned.text,
        policies=planned.policies,
        columns={name: np.array(values, np.float64) for name, values in result.rows.items()},
        num_failed=result.num_failed,
        error=result.error,
    )


def _run_json(run: Run, metrics: tuple[Metric, ...]) -> dict[str, Any]:
    figures = {each.name: each.of(run.columns) for each in metrics if each.column in run.columns}
    return {
        "name": run.name,
        "variant": run.text,
        **figures,
        "num_failed": run.num_failed,
        "error": run.error,
    }
