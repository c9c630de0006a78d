"""What all plots share: a file of a known format, a title that says of what, and a legend beside the data."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from sagellm.core import ConfigError, nearest
from sagellm.engines.whole_file import whole_file

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure

PLAIN = "{x:g}"
"""Formats the numbers of a logarithmic axis: 0.1, not a power of ten."""

_LINE_CHARS = 120
"""Characters of a legend's line in the narrowest figure."""


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


def new_figure(title: str, *, width: float, height: float) -> Figure:
    """Return an empty figure of so many inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", dpi=150)
    figure.suptitle(title, parse_math=False)  # a file's name may have a dollar
    return figure


def add_legend(figure: Figure, entries: Mapping[str, Artist]) -> None:
    """Add one legend for all axes, below them: in their frames it would hide data."""
    if not entries:
        return
    longest = max(map(len, entries))
    num_columns = max(1, min(len(entries), _LINE_CHARS // (longest + 8)))
    legend = figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=num_columns)
    for text in legend.get_texts():
        text.set_parse_math(False)


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the file's extension. Raises ConfigError if it cannot be written."""
    try:
        with whole_file(path) as file:
            figure.savefig(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the plot cannot be written to {path}") from error
