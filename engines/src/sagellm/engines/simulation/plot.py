"""Draws replays: what policies save by capacity, and how much prompts share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING

from sagellm.core import ConfigError
from sagellm.engines.whole_file import whole_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Point = tuple[int, float]
"""Capacity in blocks and token saving."""


def plot_replays(
    path: Path,
    *,
    savings: Mapping[str, Seq[Point]],
    upper_bound: float,
    sharing: Mapping[str, Seq[float]],
) -> None:
    """Write a picture in the format of the file's extension. `sharing` has a fraction for each request.

    Raises ConfigError if it cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    curve, histogram = figure.subplots(1, 2)
    _draw_savings(curve, savings)
    curve.axhline(100 * upper_bound, color="0.6", linestyle=":", label="unlimited")
    curve.set(xlabel="capacity (blocks)", ylabel="token saving (%)", xscale="log", ylim=(0, None))
    curve.legend()
    _draw_sharing(histogram, sharing)
    try:
        with whole_file(path) as file:
            figure.savefig(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the plot cannot be written to {path}") from error


def _draw_savings(axes: Axes, savings: Mapping[str, Seq[Point]]) -> None:
    for index, (name, points) in enumerate(savings.items()):
        capacities, shares = zip(*sorted(points), strict=True)
        style = "k--" if name == "belady" else "o-"
        size = max(4, 12 - 2 * index)  # where policies save the same, earlier markers show around later ones
        axes.plot(capacities, [100 * share for share in shares], style, markersize=size, label=name)


def _draw_sharing(axes: Axes, sharing: Mapping[str, Seq[float]]) -> None:
    """Draw the distributions side by side; none hides another."""
    shares = [[100 * one for one in fractions] for fractions in sharing.values()]
    axes.hist(shares, bins=10, range=(0, 100), label=list(sharing))
    axes.set(xlabel="blocks of a prompt that were reused (%)", ylabel="requests", yscale="log")
    axes.set_ylim(bottom=0.5)  # so that a bar of one request is visible
    axes.legend(fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4)  # above the bars
