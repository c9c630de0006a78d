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
    """Print the figures of a result, and what a reader of them must know; for programs, without requests."""
    if as_json:
        print_json({name: value for name, value in result.items() if name != "requests"})
    elif result["benchmark"] == "benchmark":
        _print_columns(result["figures"])
    else:
        _print_figures(result["figures"])
    if not as_json:
        _print_circumstances(result)
    for kind, errors in result["figures"].get("errors", {}).items():
        typer.echo(f"failed: {errors['count']} × {kind}: {errors['example']}", err=True)
    if "client" in result:
        client = result["client"]
        per_event = client["cpu_us_per_event"]
        typer.echo(
            f"client: {client['cpu_share']:.1%} of a core, "
            + (f"{per_event:.0f} µs an event, " if per_event is not None else "")
            + f"event loop {client['loop_lag_p99_ms']:.1f} ms late (p99)",
            err=True,
        )
    for warning in result.get("warnings", ()):
        typer.echo(f"warning: {warning}", err=True)


def _print_figures(figures: Mapping[str, Any]) -> None:
    """Print one figure per line, then the spreads as a table."""
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


def _print_circumstances(result: Result) -> None:
    """Print the machine and its limits, the engine, and what of the figures cannot be true."""
    figures, limits, machine = result["figures"], result.get("limits"), result["machine"]
    lines = []
    if "rates" in result:
        lines.append(f"\n{result['rates']['steady']:.3g} requests/s in the steady phase")
    if limits is not None:
        lines.append(
            f"read bandwidth {limits['read_bandwidth_bytes_per_s'] / 1e9:.3g} GB/s "
            f"({limits['bandwidth_source']}), peak {limits['peak_flops_per_s'] / 1e12:.3g} TFLOP/s "
            f"({limits['peak_source']})"
        )
    if "peak_source" in figures:
        lines.append(f"\npeak: {figures['peak_source']}; read bandwidth: {figures['bandwidth_source']}")
    errors = [*filter(None, [figures.get("mfu_error")]), *result.get("measurement_errors", ())]
    lines += [f"error: {error}" for error in errors]
    if "engine" in result:
        shown = ((_words(name), value) for name, value in result["engine"].items() if value is not None)
        lines.append("engine: " + ", ".join(f"{name} {_number(value)}" for name, value in shown))
    lines.append(f"\n{machine['cpu']}, {machine['cpus']} CPUs, sageLLM {machine['sagellm']}")
    typer.echo("\n".join(lines), err=True)


def _print_columns(rows: Mapping[str, Mapping[str, float | None]]) -> None:
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


def print_comparison(paths: Sequence[Path], *, as_json: bool, files: Mapping[str, Path | None]) -> None:
    """Print every figure of saved results, with its ratio to the first result's.

    Raises ConfigError if `files` are to be written, as nothing is measured.
    """
    for name, path in files.items():
        if path is not None:
            flag = f"--{name.replace('_', '-')}"
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
