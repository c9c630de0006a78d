"""Draws requests, replays and simulated runs: a title that says of what, and a legend beside the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sagellm.core import ConfigError, nearest
from sagellm.engines.whole_file import whole_file

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sagellm.core.protocols.lifetime import TrainingEpoch
    from sagellm.lab.simulation.predictor_scores import PredictorFigures
    from sagellm.lab.simulation.served_load import ServedRequest

_PLAIN = "{x:g}"
"""Formats the numbers of a logarithmic axis: 0.1, not a power of ten."""

_LINE_CHARS = 120
"""Characters of a legend's line in the narrowest figure."""

_OPTIMUM = "belady"

Point = tuple[int, float]
"""Capacity in blocks and token saving."""


def check_plot(path: Path | None) -> None:
    """Raise ConfigError if a plot is requested and matplotlib is missing or cannot write this format."""
    if path is None:
        return
    if find_spec("matplotlib") is None:
        raise ConfigError("a plot needs matplotlib: pip install 'sagellm-lab[plot]'")
    from matplotlib.backend_bases import FigureCanvasBase

    known = sorted(FigureCanvasBase.get_supported_filetypes())
    given = path.suffix.removeprefix(".").lower()
    if given not in known:
        what = f"ends with .{given}" if given else "has no suffix, which chooses the format"
        raise ConfigError(f"--plot {path} {what}; possible are {', '.join(known)}.{nearest(given, known)}")


def _new_figure(title: str, *, width: float, height: float) -> Figure:
    """Return an empty figure of so many inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", dpi=150)
    figure.suptitle(title, parse_math=False)  # a file's name may have a dollar
    return figure


def _save(figure: Figure, entries: Mapping[str, Artist], path: Path) -> None:
    """Write a figure with one legend for all axes, below them: in their frames it would hide data."""
    if entries:
        columns = min(len(entries), _LINE_CHARS // (max(map(len, entries)) + 8))
        legend = figure.legend(
            entries.values(), entries.keys(), loc="outside lower center", ncols=max(1, columns)
        )
        for text in legend.get_texts():
            text.set_parse_math(False)
    try:
        with whole_file(path) as file:
            figure.savefig(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the plot cannot be written to {path}") from error


def plot_rows(path: Path, runs: Mapping[str, Mapping[str, list[Any]]], *, title: str) -> None:
    """Draw the requests of each run, one picture below the other, in the format of the file's extension.

    Raises ConfigError if it cannot be written.
    """
    figure = _new_figure(title, width=8, height=1.5 + 3.5 * len(runs))
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
        axes.yaxis.set_major_formatter(_PLAIN)
    _save(figure, entries, path)


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
    figure = _new_figure(title, width=11, height=5)
    curve, histogram = figure.subplots(1, 2)
    colours = {name: f"C{index}" for index, name in enumerate(dict.fromkeys([*savings, *sharing]))}
    colours[_OPTIMUM] = "black"
    entries = _draw_savings(curve, savings, colours)
    entries["unlimited"] = curve.axhline(100 * upper_bound, color="0.6", linestyle=":")
    curve.set(xlabel="capacity (blocks)", ylabel="token saving (%)", ylim=(0, None))
    _draw_sharing(histogram, sharing, colours)
    _save(figure, entries, path)


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
    axes.yaxis.set_major_formatter(_PLAIN)
    axes.set_ylim(bottom=0.5)  # so that a bar of one request is visible


def plot_serving(path: Path, runs: Mapping[str, Seq[ServedRequest]], *, title: str) -> None:
    """Write a picture in the format of the file's extension. Raises ConfigError if it cannot be written."""
    figure = _new_figure(title, width=11, height=5)
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
        axis.set_major_formatter(_PLAIN)
    _save(figure, entries, path)


def plot_training(path: Path, history: Seq[TrainingEpoch], *, title: str) -> None:
    """Draw the losses of a training by epoch, and beside them the error on what was held back.

    Raises ConfigError if it cannot be written.
    """
    figure = _new_figure(title, width=9, height=4)
    losses, errors = figure.subplots(1, 2)
    epochs = [each.epoch for each in history]
    entries: dict[str, Artist] = {}
    (entries["trained on"],) = losses.plot(epochs, [each.loss for each in history])
    (entries["held back"],) = losses.plot(epochs, [each.held_back_loss for each in history])
    errors.plot(epochs, [each.held_back_mae for each in history], color=losses.lines[1].get_color())
    losses.set(xlabel="epoch", ylabel="loss (nats per request)")
    errors.set(xlabel="epoch", ylabel="mean absolute error (tokens)", ylim=(0, None))
    _save(figure, entries, path)


def plot_calibration(path: Path, figures: Seq[PredictorFigures], *, title: str) -> None:
    """Draw how often orders were right by how often they were said to be, and the mean errors.

    Raises ConfigError if it cannot be written.
    """
    figure = _new_figure(title, width=9, height=4.5)
    axes, errors = figure.subplots(1, 2)
    entries: dict[str, Artist] = {}
    for each in figures:
        if each.calibration:
            claimed, right = [row[0] for row in each.calibration], [row[1] for row in each.calibration]
            (entries[each.name],) = axes.plot(claimed, right, "o-", markersize=4)
    (entries["as claimed"],) = axes.plot([0.4, 1], [0.4, 1], ":", color="gray")
    axes.set(xlabel="confidence", ylabel="pairs in the right order")
    names = [each.name for each in figures]
    errors.barh(names, [each.mae_tokens for each in figures], color="gray")
    errors.set(xlabel="mean absolute error (tokens)")
    errors.invert_yaxis()
    _save(figure, entries, path)
