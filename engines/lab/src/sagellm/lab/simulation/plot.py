"""Draws replays: what policies save by capacity, and how much prompts share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING

from sagellm.lab.plots import PLAIN, add_legend, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

Point = tuple[int, float]
"""Capacity in blocks and token saving."""

_OPTIMUM = "belady"


def plot_replays(
    path: Path,
    *,
    title: str,
    savings: Mapping[str, Seq[Point]],
    upper_bound: float,
    sharing: Mapping[str, Seq[float]],
) -> None:
    """Write a picture in the format of the file's extension. `sharing` has a fraction for each request.

    Raises ConfigError if it cannot be written.
    """
    figure = new_figure(title, width=11, height=5)
    curve, histogram = figure.subplots(1, 2)
    colours = {name: f"C{index}" for index, name in enumerate(dict.fromkeys([*savings, *sharing]))}
    colours[_OPTIMUM] = "black"
    entries = _draw_savings(curve, savings, colours)
    entries["unlimited"] = curve.axhline(100 * upper_bound, color="0.6", linestyle=":")
    curve.set(xlabel="capacity (blocks)", ylabel="token saving (%)", ylim=(0, None))
    _draw_sharing(histogram, sharing, colours)
    add_legend(figure, entries)
    save_figure(figure, path)


def _draw_savings(
    axes: Axes, savings: Mapping[str, Seq[Point]], colours: Mapping[str, str]
) -> dict[str, Artist]:
    entries: dict[str, Artist] = {}
    for index, (name, points) in enumerate(savings.items()):
        capacities, shares = zip(*sorted(points), strict=True)
        style = "o--" if name == _OPTIMUM else "o-"
        size = max(4, 12 - 2 * index)  # where policies save the same, earlier markers show around later ones
        (entries[name],) = axes.plot(
            capacities, [100 * share for share in shares], style, color=colours[name], markersize=size
        )
    known = sorted({capacity for points in savings.values() for capacity, _ in points})
    axes.set(xscale="log", xlim=(known[0] / 1.3, known[-1] * 1.3))
    axes.set_xticks(known, labels=[f"{each:,}" for each in known], rotation=45 if len(known) > 5 else 0)
    axes.minorticks_off()
    return entries


def _draw_sharing(axes: Axes, sharing: Mapping[str, Seq[float]], colours: Mapping[str, str]) -> None:
    """Draw the distributions side by side; none hides another."""
    shares = [[100 * one for one in fractions] for fractions in sharing.values()]
    axes.hist(shares, bins=10, range=(0, 100), color=[colours[name] for name in sharing])
    axes.set(xlabel="blocks of a prompt that were reused (%)", ylabel="requests", yscale="log")
    axes.yaxis.set_major_formatter(PLAIN)
    axes.set_ylim(bottom=0.5)  # so that a bar of one request is visible
