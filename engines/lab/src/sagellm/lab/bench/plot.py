"""Draws a saved load: each request's time to first token and to its end, over its arrival."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sagellm.lab.plots import PLAIN, add_legend, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.artist import Artist


def plot_rows(runs: Mapping[str, Mapping[str, list[Any]]], path: Path, *, title: str) -> None:
    """Draw the requests of each run, one picture below the other, in the format of the file's extension.

    Raises ConfigError if it cannot be written.
    """
    figure = new_figure(title, width=8, height=1.5 + 3.5 * len(runs))
    all_axes = figure.subplots(len(runs), squeeze=False)[:, 0]
    entries: dict[str, Artist] = {}
    for axes, (name, rows) in zip(all_axes, runs.items(), strict=True):
        good = [index for index, error in enumerate(rows["error"]) if error is None]
        arrivals_s = [rows["arrival_ms"][index] / 1e3 for index in good]
        for column, label in {"end_ms": "end", "first_token_ms": "first token"}.items():
            waits_ms = [rows[column][index] - rows["arrival_ms"][index] for index in good]
            (entries[label],) = axes.plot(arrivals_s, waits_ms, ".", markersize=5)
        num_failed = len(rows["error"]) - len(good)
        failed = f"{num_failed:,} failed, not drawn" if num_failed else ""
        axes.set_title(": ".join(filter(None, (name, failed))), fontsize="medium")
        axes.set(xlabel="arrival (s)", ylabel="after the arrival (ms)", yscale="log")
        axes.yaxis.set_major_formatter(PLAIN)
    add_legend(figure, entries)
    save_figure(figure, path)
