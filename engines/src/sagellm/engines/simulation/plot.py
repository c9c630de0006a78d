"""Draws replays: what policies save by capacity, and how much prompts share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from pathlib import Path

from sagellm.core import ConfigError

Point = tuple[int, float]
"""Capacity in blocks and token saving."""


def plot_replays(
    path: Path,
    *,
    savings: Mapping[str, Seq[Point]],
    upper_bound: float,
    sharing: Mapping[str, Seq[float]],
) -> None:
    """Write a picture; its format is the file's ending. `sharing` has a fraction for each request.

    Raises ConfigError if it cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    curve, histogram = figure.subplots(1, 2)
    for name, points in savings.items():
        capacities, shares = zip(*sorted(points), strict=True)
        style = "k--" if name == "belady" else "o-"
        curve.plot(capacities, [100 * share for share in shares], style, label=name)
    curve.axhline(100 * upper_bound, color="0.6", linestyle=":", label="unlimited")
    curve.set(xlabel="capacity (blocks)", ylabel="token saving (%)", xscale="log", ylim=(0, None))
    curve.legend()
    shares = [[100 * one for one in fractions] for fractions in sharing.values()]
    histogram.hist(shares, bins=10, range=(0, 100), label=list(sharing))  # side by side: none hides another
    histogram.set(xlabel="blocks of a prompt that were reused (%)", ylabel="requests", yscale="log")
    histogram.legend(fontsize="small")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the plot cannot be written to {path}") from error
