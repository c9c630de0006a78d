"""Figures by name, as text; the name determines the unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from sagellm.engines.cli.output import columns
from sagellm.engines.sizes import format_bytes

_TIER_FIGURES = {
    "BLOCKS": "num_blocks",
    "BYTES": "num_bytes",
    "OF": "max_bytes",
    "PUTS": "num_puts",
    "GETS": "num_gets",
    "HITS": "num_hits",
    "CORRUPT": "num_corrupt",
    "FOREIGN": "num_foreign",
    "FAILED": "num_failed",
}
_MAX_TENANTS = 20
_TENANT_FIGURES = {
    "FULL BLOCKS": "num_blocks",
    "PARTIAL": "num_partial_blocks",
    "QUOTA": "max_blocks",
    "HITS": "num_hits",
    "TOKENS SAVED": "num_hit_tokens",
    "EVICTED BLOCKS": "num_evicted_blocks",
}
_SHARES = ("_rate", "_efficiency", "_share", "_fragmentation", "_percent")
_PER_SECOND = "_per_s"


def figures_table(figures: Mapping[str, Any]) -> str:
    """Write one figure per row; None and empty values are left out."""
    rows = [
        (label(name), write(name, value)) for name, value in figures.items() if value not in (None, "", ())
    ]
    return columns(("FIGURE", "VALUE"), rows)


def tiers_table(tiers: Mapping[str, Mapping[str, Any]]) -> str:
    """Write what each tier holds, and the outcomes of its requests."""
    head, names = zip(*_TIER_FIGURES.items(), strict=True)
    rows = [(tier, *(write(name, figures[name]) for name in names)) for tier, figures in tiers.items()]
    return columns(("TIER", *head), rows)


def passes_table(passes: Sequence[Mapping[str, Any]]) -> str:
    """Write how often each pass of the scheduler ran, what it decided and how long that took."""
    rows = [
        (each["name"], *(f"{each[name]:,}" for name in ("num_runs", "num_decisions")), _mean_us(each))
        for each in passes
    ]
    return columns(("PASS", "RUNS", "DECISIONS", "MEAN US"), rows)


def _mean_us(each: Mapping[str, Any]) -> str:
    return f"{each['total_ns'] / each['num_runs'] / 1e3:,.1f}" if each["num_runs"] else "-"


def tenants_table(tenants: Mapping[str, Mapping[str, Any]]) -> str:
    """Write each tenant's use of and savings from a prefix cache, only those with the most blocks."""
    largest = sorted(tenants.items(), key=lambda item: -item[1]["num_blocks"])
    head, names = zip(*_TENANT_FIGURES.items(), strict=True)
    rows = [
        (tenant, *("-" if usage[name] is None else write(name, usage[name]) for name in names))
        for tenant, usage in largest[:_MAX_TENANTS]
    ]
    num_more = len(largest) - len(rows)
    more = f"\nand {num_more:,} more, which --json has" if num_more else ""
    return columns(("TENANT", *head), rows) + more


def label(name: str) -> str:
    """Write the name of a figure for people: `num_free_blocks` is `free blocks`."""
    short = name.removeprefix("num_")
    if name.endswith(_PER_SECOND):
        return short.removesuffix(_PER_SECOND).replace("_", " ") + "/s"
    for unit in ("_ns", "_bytes", "_s"):
        short = short.removesuffix(unit)
    return short.replace("_percent", " %").replace("_", " ")


def write(name: str, value: Any) -> str:
    """Write a figure in the unit given by its name."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if name.endswith("_ns"):
        return f"{value / 1e6:,.3f} ms"
    if name.endswith("_bytes"):
        return format_bytes(int(value))
    if name.endswith("_s") and not name.endswith(_PER_SECOND):
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
