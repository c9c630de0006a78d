"""Compares results: every figure with its ratio to the first result's, and which ones got worse."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import hypot, sqrt
from typing import Any

from sagellm.core import ConfigError
from sagellm.lab.bench.results import Result

_OWN = ("base_url", "model")  # settings that may differ between comparable loads
TOLERANCE = 0.05
"""A smaller change is never called one: a second run on the same machine differs by as much."""

_NUM_ERRORS = 2.0  # standard errors that a change must exceed
_SIGMAS_TO_P90 = 1.2816  # of a normal distribution
_MEDIAN_ERROR = 1.2533  # standard error of a median ÷ that of a mean, of a normal distribution

# What a figure's name ends with, or holds in its last part, and which way is better.
_MORE_IS_BETTER = (
    "_per_s",
    "mfu",
    "bandwidth_use",
    "roofline_ratio",
    "hit_rate",
    "saving",
    "efficiency",
    "goodput",
)
_LESS_IS_BETTER = ("_ms", "_s", "_mib", "num_failed")
_JUDGED_OF_SPREADS = ("mean", "median")  # extremes and tails of few values are mostly luck
_OF_THE_MACHINE = ("peak_gflops_per_s", "gemm_gflops_per_s", "read_bandwidth_gbytes_per_s")
_OF_THE_LOAD = ("duration_s", "late_ms", "ideal_hit_rate")
_STEADINESS = "output_tenths_tokens_per_s"


@dataclass(frozen=True, kw_only=True)
class ComparedFigure:
    """One figure of all results; a ratio is None where the first is 0 or one is missing.

    `noises` are the relative standard errors of the values, None where a result does not show them.
    """

    name: str
    values: tuple[float | None, ...]
    noises: tuple[float | None, ...] = ()

    @property
    def ratios(self) -> tuple[float | None, ...]:
        """Return each value ÷ the first."""
        base = self.values[0]
        return tuple(value / base if base and value is not None else None for value in self.values)


@dataclass(frozen=True, kw_only=True)
class Change:
    """A figure of one result that differs from the first result's by more than noise."""

    name: str
    index: int  # of the result
    ratio: float
    threshold: float  # the relative change up to which it would have counted as noise
    is_worse: bool


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The figures, what changed for the worse or the better, and the other differences of the results."""

    figures: list[ComparedFigure]
    changes: list[Change]
    differences: list[str]

    @property
    def regressions(self) -> list[Change]:
        """What got worse."""
        return [change for change in self.changes if change.is_worse]


def compare_results(results: Sequence[Result]) -> Comparison:
    """Compare results of one benchmark. Raises ConfigError for fewer than two or different ones.

    A figure changed if it moved by more than 5 %, and by more than twice the standard error of the two
    values: that of a median or mean follows from its spread, that of a throughput from the tenths of its run.
    """
    if len(results) < 2:
        raise ConfigError("a comparison needs two results or more: --compare A.json B.json")
    kinds = [str(result.get("benchmark")) for result in results]
    if len(set(kinds)) > 1:
        raise ConfigError(f"the results are of different benchmarks: {', '.join(kinds)}")
    each = [dict(_numbers(result["figures"])) for result in results]
    noises = [dict(_noises(result["figures"])) for result in results]
    names = dict.fromkeys(name for figures in each for name in figures)
    figures = [
        ComparedFigure(
            name=name,
            values=tuple(figures.get(name) for figures in each),
            noises=tuple(noise.get(name) for noise in noises),
        )
        for name in names
    ]
    return Comparison(
        figures=figures,
        changes=[change for figure in figures for change in _changes(figure)],
        differences=list(_differences(results)),
    )


def more_is_better(name: str) -> bool | None:
    """Whether a larger figure is better; None where neither direction is."""
    parts = name.split(".")
    figure = parts[-1]
    if figure in _SPREAD_PARTS:
        if figure not in _JUDGED_OF_SPREADS:
            return None
        figure = parts[-2]
    elif parts[0] in ("alone", "saturated", "steady"):  # of `benchmark`: figure, then server
        figure = parts[1]
    if figure in (*_OF_THE_MACHINE, *_OF_THE_LOAD, _STEADINESS):
        return None
    if figure.endswith(_MORE_IS_BETTER):
        return True
    return False if figure.endswith(_LESS_IS_BETTER) else None


_SPREAD_PARTS = ("mean", "min", "median", "p90", "p95", "p99", "max")


def _changes(figure: ComparedFigure) -> Iterator[Change]:
    is_more_better = more_is_better(figure.name)
    base = figure.values[0]
    if is_more_better is None or base is None:
        return
    for index, value in enumerate(figure.values[1:], 1):
        if value is None or value == base:
            continue
        threshold = max(TOLERANCE, _NUM_ERRORS * hypot(figure.noises[0] or 0.0, figure.noises[index] or 0.0))
        ratio = value / base if base else float("inf")
        if abs(ratio - 1) > threshold:
            is_worse = (ratio > 1) is not is_more_better
            yield Change(name=figure.name, index=index, ratio=ratio, threshold=threshold, is_worse=is_worse)


def _noises(figures: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the relative standard errors that spreads show: of their mean and median, and of throughputs."""
    for name, value in figures.items():
        if not isinstance(value, dict):
            continue
        if "p90" not in value:
            yield from _noises(value, f"{prefix}{name}.")
        elif value.get("count", 0) > 1 and value["median"] > 0:
            error = _standard_error(value)
            yield f"{prefix}{name}.mean", error / value["mean"]
            yield f"{prefix}{name}.median", _MEDIAN_ERROR * error / value["median"]
            if name == _STEADINESS:
                rates = (one for one in figures if one.endswith("_per_s") or one in ("mfu", "bandwidth_use"))
                yield from ((f"{prefix}{one}", error / value["mean"]) for one in (*rates, "roofline_ratio"))


def _standard_error(spread: Mapping[str, float]) -> float:
    """Return the standard error of the mean, from the way from the median to the 90th percentile."""
    sigma = max(0.0, spread["p90"] - spread["median"]) / _SIGMAS_TO_P90
    return sigma / sqrt(spread["count"])


def _numbers(figures: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
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
