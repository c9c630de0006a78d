"""Draws a saved load: each request's time to first token and to its end, over its arrival."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sagellm.core import ConfigError
from sagellm.engines.bench.results import Result
from sagellm.engines.whole_file import whole_file


def plot_result(result: Result, path: Path) -> None:
    """Draw one saved load, in the format of the file's extension."""
    plot_rows({"": result["requests"]}, path)


def plot_rows(runs: Mapping[str, Mapping[str, list[Any]]], path: Path) -> None:
    """Draw the requests of each run, one picture below the other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1 + 4 * len(runs)), layout="constrained")
    all_axes = figure.subplots(len(runs), squeeze=False)[:, 0]
    for axes, (title, rows) in zip(all_axes, runs.items(), strict=True):
        good = [index for index, error in enumerate(rows["error"]) if error is None]
        arrivals_s = [rows["arrival_ms"][index] / 1e3 for index in good]
        for name, label in {"first_token_ms": "first token", "end_ms": "end"}.items():
            waits_ms = [rows[name][index] - rows["arrival_ms"][index] for index in good]
            axes.plot(arrivals_s, waits_ms, ".", label=label)
        axes.set(title=title, xlabel="arrival (s)", ylabel="after the arrival (ms)", yscale="log")
        axes.legend()
    try:
        with whole_file(path) as file:
            figure.savefig(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the plot cannot be written to {path}") from error
