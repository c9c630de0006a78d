"""`simulate --cost`: requests that wait, run and are preempted, on virtual time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from sagellm.core import ConfigError, ProviderSpec
from sagellm.core.plugins.option_text import split
from sagellm.engines.cli.engine_flags import setting_flag
from sagellm.engines.cli.output import columns, print_json
from sagellm.engines.config.sources import load_config
from sagellm.engines.progress import progress_bar
from sagellm.lab.cli.flags import flag
from sagellm.lab.files import write_json_lines

if TYPE_CHECKING:
    from sagellm.core import LifetimeMetrics, TraceRequest
    from sagellm.engines.config.schema import EngineConfig
    from sagellm.lab.simulation.serving import ServingRun
    from sagellm.lab.simulation.serving_figures import ServingFigures, Tail

_HEAD = (
    "PASSES", "GOODPUT/S", "TOKENS/S", "TTFT MEAN", "P50", "P99", "TPOT MEAN", "WAIT P99", "HIT RATE",
    "RE-PREFILL", "BATCHING", "LOWERED", "PREEMPTED", "JAIN",
)  # fmt: skip


_flag = partial(flag, group="Serving (with --cost)")

_SETTINGS = {
    "num_blocks": "kv.num_blocks",
    "kv_tiers": "kv.tiers",
    "kv_fetch": "kv.fetch",
    "enable_prefix_caching": "prefix_cache.enabled",
    "scheduler": "scheduler.name",
    "step_target_ms": "scheduler.step_target_ms",
    "max_num_batched_tokens": "scheduler.max_num_batched_tokens",
    "max_num_seqs": "scheduler.max_num_seqs",
    "lifetime_predictor": "predictor.name",
}

SERVING_FLAGS = (
    _flag("cost", Path, "FILE", "Simulate serving, with steps that take what this file says."),
    _flag(
        "stretch",
        float,
        "FLOAT",
        "Multiply arrival times by this; below 1, the load is heavier. [default: 1]",
    ),
    setting_flag("scheduler_passes", "scheduler.passes", "--passes"),
    _flag("compare", list[str], "PASSES", "Also run with these scheduler passes: 'order=none'."),
    _flag("max_ttft_s", float, "SECONDS", "A good request's time to its first token … [default: 2]", min=0),
    _flag(
        "max_ttft_prefills", float, "FLOAT", "… plus this many times its prompt's own. [default: 3]", min=0
    ),
    _flag("max_tpot_ms", float, "MS", "Its milliseconds per token after the first. [default: 50]", min=0),
    _flag("tenant_weights", str, "LIST", "Weights of tenants: a=3,b=1; others have 1."),
    _flag("oracle", float, "ERROR", "Predict recorded lengths with this error (0: exactly); a bound.", min=0),
    *(setting_flag(name, key) for name, key in _SETTINGS.items()),
)
"""Flags that `--cost` reads, besides the trace's and those of what is written."""


class ServingTargets(NamedTuple):
    """Where results go."""

    plot: Path | None
    requests: Path | None
    as_json: bool


def simulate_serving(
    trace: Path,
    requests: Sequence[TraceRequest],
    options: Mapping[str, Any],
    targets: ServingTargets,
    config: Path | None,
    *,
    with_default: bool,
) -> None:
    """Run a trace under each pipeline, and print the figures. Raises ConfigError before the first run.

    Beside the passes of `--passes` stand those that would run without the flag, if `with_default` is true.
    """
    from sagellm.lab.simulation.serving import simulate_serving as run, with_passes
    from sagellm.lab.simulation.serving_figures import ServingLimits
    from sagellm.lab.simulation.step_costs import read_step_costs

    costs = read_step_costs(options["cost"])
    settings = _settings(requests, options, config)
    pipelines = {_name(settings): settings}
    compared = [with_passes(settings, text) for text in options.get("compare") or ()]
    if with_default and "scheduler_passes" in options:
        without = {name: value for name, value in options.items() if name != "scheduler_passes"}
        compared.insert(0, _settings(requests, without, config))
    for each in compared:
        pipelines.setdefault(_name(each), each)
    limits = ServingLimits(
        **{
            name: options[given]
            for name, given in (
                ("ttft_s", "max_ttft_s"),
                ("ttft_prefills", "max_ttft_prefills"),
                ("tpot_ms", "max_tpot_ms"),
            )
            if given in options
        }
    )
    load, predictor = _load(options), _oracle(requests, options)
    started = time.perf_counter()
    found: dict[str, ServingRun] = {}
    total = len(requests) * len(pipelines)
    with progress_bar("simulating", total=total, unit="requests") as advance:
        for name, each in pipelines.items():
            found[name] = run(
                requests, each, costs, load=load, limits=limits, predictor=predictor, advance=advance
            )
    elapsed_s = time.perf_counter() - started
    title = f"{trace.name}: {len(requests):,} requests; steps cost what is in {options['cost'].name}"
    _write(found, targets, title)
    if targets.as_json:
        print_json(_as_json(trace, costs.source, found))
    else:
        typer.echo(_text(requests, costs.source, found, elapsed_s))
        asked = "oracle" if predictor is not None else settings.predictor.name.text
        typer.echo(f"\n{_predictor_text(asked, next(iter(found.values())).predictor)}")


def _settings(
    requests: Sequence[TraceRequest], options: Mapping[str, Any], config: Path | None
) -> EngineConfig:
    from sagellm.lab.cli.simulate import with_block_size

    names = (*_SETTINGS, "scheduler_passes", "prefix_cache")
    flags = {name: options[name] for name in names if name in options}
    settings = load_config(flags, config_file=config).config
    policies = [name for text in options.get("eviction_policy") or () for name in split(text)]
    if len(policies) > 1:
        raise ConfigError(f"--eviction-policy names {len(policies)} policies; serving is simulated with one")
    if policies:
        settings = settings.with_values({"prefix_cache.eviction_policy": ProviderSpec.of(policies[0])})
    return with_block_size(settings, requests, options.get("block_size"))


def _load(options: Mapping[str, Any]) -> Any:
    from sagellm.lab.simulation.served_load import LoadSettings

    weights: dict[str, float] = {}
    for part in split(options.get("tenant_weights") or ""):
        name, _, value = part.partition("=")
        try:
            weights[name.strip()] = float(value)
        except ValueError:
            raise ConfigError(f"--tenant-weights has {part!r}; write name=2.5") from None
    return LoadSettings(stretch=options.get("stretch", 1.0), weights=weights)


def _oracle(requests: Sequence[TraceRequest], options: Mapping[str, Any]) -> Any:
    if "oracle" not in options:
        return None
    from sagellm.lab.simulation.oracle import OraclePredictor
    from sagellm.lab.simulation.served_load import output_lens

    return OraclePredictor(output_lens(requests), error=options["oracle"])


_ALL_ALIKE = """
All pipelines had the same figures: hardly any request waited. Try more load (--stretch 0.1),
fewer blocks (--num-blocks) or fewer seats (--max-num-seqs)."""


def _name(settings: EngineConfig) -> str:
    return ",".join(spec.text for spec in settings.scheduler.pipeline) or "none"


def _text(
    requests: Sequence[TraceRequest], source: str, found: Mapping[str, ServingRun], elapsed_s: float
) -> str:
    first = next(iter(found.values()))
    kv, num_steps = first.config.kv, sum(run.figures.num_steps for run in found.values())
    lines = [
        f"{len(requests):,} requests, {kv.num_blocks:,} blocks of {kv.block_size}; "
        f"{num_steps:,} steps in {elapsed_s:.1f} s",
        f"steps cost what is in a file: {source}",
        "",
        columns(_HEAD, [_row(name, run.figures) for name, run in found.items()]),
    ]
    if len(found) > 1 and all(run.figures == first.figures for run in found.values()):
        lines.append(_ALL_ALIKE)
    for name, run in found.items():
        if run.figures.num_failed:
            failed = next(one.error for one in run.requests if one.error is not None)
            lines.append(f"\n{name}: {run.figures.num_failed:,} requests failed: {failed}")
    return "\n".join(lines)


def _predictor_text(name: str, scores: LifetimeMetrics) -> str:
    if scores.mae_tokens is None or scores.median_mae_tokens is None:
        return f"lifetime predictor {name}: none of {scores.num_predictions:,} predictions could be scored"
    return (
        f"lifetime predictor {name}: {scores.num_scored:,} predictions are off by {scores.mae_tokens:.1f} "
        f"tokens on average (the median length would be by {scores.median_mae_tokens:.1f}), "
        f"{scores.within_10_percent or 0:.1%} of them by at most 10 %"
    )


def _row(name: str, figures: ServingFigures) -> tuple[str, ...]:
    ttft, tpot, waited = figures.ttft_s, figures.tpot_s, figures.queueing_s
    return (
        name,
        f"{figures.goodput_requests_per_s:.3f}",
        f"{figures.output_throughput_tokens_per_s:,.0f}",
        _seconds(ttft, "mean"),
        _seconds(ttft, "p50"),
        _seconds(ttft, "p99"),
        "-" if tpot is None else f"{1e3 * tpot.mean:.1f} ms",
        _seconds(waited, "p99"),
        f"{figures.token_hit_rate:.1%}",
        f"{figures.re_prefill_rate:.1%}",
        _share(figures.batching_efficiency),
        _share(figures.lowered_batching_efficiency),
        f"{figures.num_preemptions:,}",
        "-" if figures.jains_index is None else f"{figures.jains_index:.3f}",
    )


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _seconds(tail: Tail | None, name: str) -> str:
    return "-" if tail is None else f"{getattr(tail, name):.3f} s"


def _as_json(trace: Path, source: str, found: Mapping[str, ServingRun]) -> dict[str, Any]:
    return {
        "trace": str(trace),
        "cost": source,
        "runs": [
            {
                "passes": name,
                "num_blocks": run.config.kv.num_blocks,
                "block_size": run.config.kv.block_size,
                **asdict(run.figures),
                "predictor": asdict(run.predictor),
            }
            for name, run in found.items()
        ],
    }


def _write(found: Mapping[str, ServingRun], targets: ServingTargets, title: str) -> None:
    if targets.plot is not None:
        from sagellm.lab.plots import plot_serving

        plot_serving(targets.plot, {name: run.requests for name, run in found.items()}, title=title)
    if targets.requests is not None:
        rows = ({"passes": name} | asdict(request) for name, run in found.items() for request in run.requests)
        write_json_lines(targets.requests, rows, "requests")
