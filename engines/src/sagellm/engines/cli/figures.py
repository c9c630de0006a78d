"""Figures by name, as text: the name says the unit."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from sagellm.engines.cli.output import columns
from sagellm.engines.sizes import format_bytes

_SHARES = ("_rate", "_share", "_fragmentation", "_percent")


def figures_table(figures: Mapping[str, Any]) -> str:
    """Write one figure a row; what is None or empty is left out."""
    rows = [
        (label(name), write(name, value)) for name, value in figures.items() if value not in (None, "", ())
    ]
    return columns(("FIGURE", "VALUE"), rows)


def label(name: str) -> str:
    """Write the name of a figure for people: `num_free_blocks` is `free blocks`."""
    short = name.removeprefix("num_")
    for unit in ("_ns", "_bytes", "_s"):
        short = short.removesuffix(unit)
    return short.replace("_percent", " %").replace("_", " ")


def write(name: str, value: Any) -> str:
    """Write a figure in the unit that its name has."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if name.endswith("_ns"):
        return f"{value / 1e6:,.3f} ms"
    if name.endswith("_bytes"):
        return format_bytes(int(value))
    if name.endswith("_s"):
        return write_duration(value)
    if name.endswith(_SHARES):
        return f"{value:.1%}"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def write_duration(seconds: float) -> str:
    """Write seconds in the two largest units: `3 h 12 min`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    whole = int(seconds)
    units = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))
    for (large, large_name), (small, small_name) in pairwise(units):
        if whole >= large:
            return f"{whole // large} {large_name} {whole % large // small} {small_name}"
    raise AssertionError("a minute is at least a minute")
