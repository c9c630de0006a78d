"""Compares results: every figure, and its ratio to the first result's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sagellm.core import ConfigError
from sagellm.engines.bench.results import Result

_OWN = ("base_url", "model")  # settings that may differ between comparable loads


@dataclass(frozen=True, kw_only=True)
class ComparedFigure:
    """One figure of all results; a ratio is None where the first is 0 or one is missing."""

    name: str
    values: tuple[float | None, ...]

    @property
    def ratios(self) -> tuple[float | None, ...]:
        """Return each value ÷ the first."""
        base = self.values[0]
        return tuple(value / base if base and value is not None else None for value in self.values)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The figures, and the other differences between the results."""

    figures: list[ComparedFigure]
    differences: list[str]


def compare_results(results: Sequence[Result]) -> Comparison:
    """Compare results of one benchmark. Raises ConfigError for fewer than two or different ones."""
    if len(results) < 2:
        raise ConfigError("a comparison needs two results or more: --compare A.json B.json")
    kinds = [str(result.get("benchmark")) for result in results]
    if len(set(kinds)) > 1:
        raise ConfigError(f"the results are of different benchmarks: {', '.join(kinds)}")
    each = [dict(_numbers(result["figures"])) for result in results]
    names = dict.fromkeys(name for figures in each for name in figures)
    return Comparison(
        figures=[
            ComparedFigure(name=name, values=tuple(figures.get(name) for figures in each)) for name in names
        ],
        differences=list(_differences(results)),
    )


def _numbers(figures: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in figures.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool) and name != "count":
            yield f"{prefix}{name}", float(value)


def _differences(results: Sequence[Result]) -> Iterator[str]:
    for section in ("settings", "machine"):
        parts = [result.get(section) or {} for result in results]
        for name in dict.fromkeys(name for part in parts for name in part):
            values = [part.get(name) for part in parts]
            if name not in _OWN and any(value != values[0] for value in values):
                yield f"{section}.{name}: {' | '.join(str(value) for value in values)}"
