"""`simulate --cost`: requests that wait, run and are preempted, on virtual time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from sagellm.engines.cli.output import columns, print_json
from sagellm.engines.progress import progress_bar
from sagellm.lab.cli.flags import flag
from sagellm.lab.cli.serving_flags import read_limits, read_load, read_settings
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


ORACLE_FLAG = flag(
    "oracle",
    float,
    "ERROR",
    "Predict recorded lengths with this error (0: exactly); a bound.",
    group="Serving (with --cost)",
    min=0,
)


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
) -> None:
    """Run a trace, and print the figures. Raises ConfigError before it runs."""
    from sagellm.lab.simulation.serving import simulate_serving as run
    from sagellm.lab.simulation.step_costs import read_step_costs

    costs = read_step_costs(options["cost"])
    settings = read_settings(requests, options, config)
    load, limits, predictor = read_load(options), read_limits(options), _oracle(requests, options)
    started = time.perf_counter()
    with progress_bar("simulating", total=len(requests), unit="requests") as advance:
        found = run(requests, settings, costs, load=load, limits=limits, predictor=predictor, advance=advance)
    elapsed_s = time.perf_counter() - started
    title = f"{trace.name}: {len(requests):,} requests; steps cost what is in {options['cost'].name}"
    _write(found, targets, title)
    if targets.as_json:
        print_json(_as_json(trace, costs.source, found))
    else:
        typer.echo(_text(costs.source, found, elapsed_s))
        asked = "oracle" if predictor is not None else settings.predictor.name.text
        typer.echo(f"\n{_predictor_text(asked, found.predictor)}")


def _oracle(requests: Sequence[TraceRequest], options: Mapping[str, Any]) -> Any:
    if "oracle" not in options:
        return None
    from sagellm.lab.simulation.oracle import OraclePredictor
    from sagellm.lab.simulation.served_load import output_lens

    return OraclePredictor(output_lens(requests), error=options["oracle"])


def _name(settings: EngineConfig) -> str:
    return ",".join(spec.text for spec in settings.scheduler.pipeline) or "none"


def _text(source: str, found: ServingRun, elapsed_s: float) -> str:
    kv, figures = found.config.kv, found.figures
    lines = [
        f"{len(found.requests):,} requests, {kv.num_blocks:,} blocks of {kv.block_size}; "
        f"{figures.num_steps:,} steps in {elapsed_s:.1f} s",
        f"steps cost what is in a file: {source}",
        "",
        columns(_HEAD, [_row(_name(found.config), figures)]),
    ]
    if figures.num_failed:
        failed = next(one.error for one in found.requests if one.error is not None)
        lines.append(f"\n{figures.num_failed:,} requests failed: {failed}")
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


def _as_json(trace: Path, source: str, found: ServingRun) -> dict[str, Any]:
    return {
        "trace": str(trace),
        "cost": source,
        "passes": _name(found.config),
        "num_blocks": found.config.kv.num_blocks,
        "block_size": found.config.kv.block_size,
        **asdict(found.figures),
        "predictor": asdict(found.predictor),
    }


def _write(found: ServingRun, targets: ServingTargets, title: str) -> None:
    if targets.plot is not None:
        from sagellm.lab.plots import plot_serving

        plot_serving(targets.plot, {_name(found.config): found.requests}, title=title)
    if targets.requests is not None:
        write_json_lines(targets.requests, map(asdict, found.requests), "requests")
