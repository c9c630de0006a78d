"""Draws a saved load: each request's time to first token and to its end, over its arrival."""

from __future__ import annotations

from pathlib import Path

from sagellm.core import ConfigError
from sagellm.engines.bench.results import Result
from sagellm.engines.whole_file import whole_file


def plot_result(result: Result, path: Path) -> None:
    """Write a picture of a saved load in the format of the file's extension."""
    from matplotlib.figure import Figure

    rows = result["requests"]
    good = [index for index, error in enumerate(rows["error"]) if error is None]
    arrivals_s = [rows["arrival_ms"][index] / 1e3 for index in good]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for name, label in {"first_token_ms": "first token", "end_ms": "end"}.items():
        waits_ms = [rows[name][index] - rows["arrival_ms"][index] for index in good]
        axes.plot(arrivals_s, waits_ms, ".", label=label)
    axes.set(xlabel="arrival (s)", ylabel="after the arrival (ms)", yscale="log")
    axes.legend()
    try:
        with whole_file(path) as file:
            figure.savefig(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the plot cannot be written to {path}") from error
