"""Draws simulated runs: how long requests waited for their first token, and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING

from sagellm.lab.plots import PLAIN, add_legend, new_figure, save_figure
from sagellm.lab.simulation.served_load import ServedRequest

if TYPE_CHECKING:
    from matplotlib.artist import Artist


def plot_serving(path: Path, runs: Mapping[str, Seq[ServedRequest]], *, title: str) -> None:
    """Write a picture in the format of the file's extension. Raises ConfigError if it cannot be written."""
    figure = new_figure(title, width=11, height=5)
    shares, times = figure.subplots(1, 2)
    entries: dict[str, Artist] = {}
    for index, (name, served) in enumerate(runs.items()):
        done = [one for one in served if one.first_token_ns is not None]
        arrivals = [one.arrival_ns / 1e9 for one in done]
        ttfts = [((one.first_token_ns or 0) - one.arrival_ns) / 1e9 for one in done]
        percents = [100 * (n + 1) / len(served) for n in range(len(ttfts))]  # requests that failed have none
        width = max(1.2, 3.6 - 1.2 * index)  # where runs are alike, earlier ones show around later ones
        (entries[name],) = shares.plot(sorted(ttfts), percents, linewidth=width, drawstyle="steps-post")
        times.plot(arrivals, ttfts, ".", markersize=2 * width)
    shares.set(xlabel="time to first token (s)", ylabel="requests (%)", xscale="log", ylim=(0, 102))
    times.set(xlabel="arrival (s)", ylabel="time to first token (s)", yscale="log")
    for axis in (shares.xaxis, times.yaxis):
        axis.set_major_formatter(PLAIN)
    add_legend(figure, entries)
    save_figure(figure, path)
