"""Prints results and comparisons, for people and for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from sagellm.core import ConfigError
from sagellm.engines.cli.output import columns, print_json
from sagellm.lab.bench.compare import Change, compare_results
from sagellm.lab.bench.results import Result, load_result

_SPREAD = ("mean", "min", "median", "p90", "p95", "p99")
_UNITS = ("_gflops_per_s", "_gbytes_per_s", "_tokens_per_s", "_requests_per_s", "_per_s", "_ms", "_s", "_mib")
_SHOWN_UNITS = ("GFLOP/s", "GB/s", "tokens/s", "requests/s", "/s", "ms", "s", "MiB")


def print_result(result: Result, *, as_json: bool) -> None:
    """Print the figures of a result: one per line, then the spreads as a table."""
    if as_json:
        print_json(result)
        return
    figures: dict[str, Any] = result["figures"]
    single = [(_words(name), _number(value)) for name, value in figures.items() if _is_number(value)]
    width = max(len(name) for name, _ in single)
    for name, number in single:
        typer.echo(f"{name.ljust(width)}  {number}")
    spreads = {
        name: value for name, value in figures.items() if isinstance(value, dict) and "median" in value
    }
    if spreads:
        rows = [(_words(name), *(_number(one[key]) for key in _SPREAD)) for name, one in spreads.items()]
        typer.echo("\n" + columns(("", *(key.upper() for key in _SPREAD)), rows))
    if "peak_source" in figures:
        typer.echo(
            f"\npeak: {figures['peak_source']}; read bandwidth: {figures['bandwidth_source']}", err=True
        )
    if figures.get("mfu_error") is not None:
        typer.echo(f"error: {figures['mfu_error']}", err=True)
    if "engine" in result:
        shown = ((_words(name), value) for name, value in result["engine"].items() if value is not None)
        typer.echo("engine: " + ", ".join(f"{name} {_number(value)}" for name, value in shown), err=True)
    machine = result["machine"]
    typer.echo(f"\n{machine['cpu']}, {machine['cpus']} CPUs, sageLLM {machine['sagellm']}", err=True)


def print_serve_result(result: Result, *, as_json: bool) -> None:
    """Print a load's figures, its failures, the client's own cost, and warnings."""
    print_result(result, as_json=as_json)
    for kind, errors in result["figures"]["errors"].items():
        typer.echo(f"failed: {errors['count']} × {kind}: {errors['example']}", err=True)
    client = result["client"]
    per_event = client["cpu_us_per_event"]
    typer.echo(
        f"client: {client['cpu_share']:.1%} of a core, "
        + (f"{per_event:.0f} µs an event, " if per_event is not None else "")
        + f"event loop {client['loop_lag_p99_ms']:.1f} ms late (p99)",
        err=True,
    )
    for warning in result["warnings"]:
        typer.echo(f"warning: {warning}", err=True)


def print_columns(rows: Mapping[str, Mapping[str, float | None]]) -> None:
    """Print one figure per line with a column for each server, and the first one's ratio to the others."""
    servers = list(dict.fromkeys(name for values in rows.values() for name in values))
    head = ["", *servers, *(f"{servers[0]} ÷ {other}" for other in servers[1:])]
    lines = []
    for name, values in rows.items():
        first = values.get(servers[0])
        ratios = (
            f"{first / other:.3f}" if first is not None and other else "-"
            for other in (values.get(one) for one in servers[1:])
        )
        lines.append((_words(name), *(_number(values.get(one)) for one in servers), *ratios))
    typer.echo(columns(head, lines))


def print_comparison(
    paths: Sequence[Path], *, as_json: bool, save: Path | None = None, plot: Path | None = None
) -> None:
    """Print every figure of saved results, with its ratio to the first result's.

    Raises ConfigError if a result is to be saved or plotted, as nothing is measured.
    """
    for flag, path in {"--save": save, "--plot": plot}.items():
        if path is not None:
            raise ConfigError(
                f"{flag} {path} is given with --compare, which measures nothing: leave {flag} out, or give "
                "it with the run that is measured"
            )
    found = compare_results([load_result(path) for path in paths])
    if as_json:
        rows = [{"name": one.name, "values": one.values, "ratios": one.ratios} for one in found.figures]
        print_json(
            {
                "results": [str(path) for path in paths],
                "figures": rows,
                "regressions": [_change_row(change, paths) for change in found.regressions],
                "gains": [_change_row(change, paths) for change in found.changes if not change.is_worse],
                "differ": found.differences,
            }
        )
        return
    first, *others = (path.stem for path in paths)
    head = ["", first]
    for name in others:
        head += [name, f"÷ {first}"]
    rows_shown = []
    for figure in found.figures:
        cells = [_number(figure.values[0])]
        for value, ratio in zip(figure.values[1:], figure.ratios[1:], strict=True):
            cells += [_number(value), "-" if ratio is None else f"{ratio:.3f}"]
        rows_shown.append((figure.name, *cells))
    typer.echo(columns(head, rows_shown))
    for difference in found.differences:
        typer.echo(f"differs: {difference}", err=True)
    for change in found.regressions:
        typer.echo(
            f"regression in {paths[change.index].stem}: {change.name} is {change.ratio:.3f} × "
            f"{first}'s (up to ±{change.threshold:.0%} would be noise)",
            err=True,
        )


def _change_row(change: Change, paths: Sequence[Path]) -> dict[str, Any]:
    return {
        "name": change.name,
        "result": str(paths[change.index]),
        "ratio": change.ratio,
        "noise": change.threshold,
    }


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.0f}" if value >= 10_000 else f"{value:.4g}"


def _words(name: str) -> str:
    """Write `output_throughput_tokens_per_s` as `output throughput (tokens/s)`."""
    for unit, shown in zip(_UNITS, _SHOWN_UNITS, strict=True):
        if name.endswith(unit):
            return f"{name.removesuffix(unit).replace('_', ' ')} ({shown})"
    return name.removeprefix("num_").replace("_", " ")
