"""Plots of a comparison as inline SVG, in colours that the page chooses for light and dark."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass
from html import escape

import numpy as np

from sagellm.lab.ab.comparison import Change, Comparison
from sagellm.lab.ab.metrics import Column
from sagellm.lab.ab.words import change_text, interval_text

WIDTH = 420
"""Of every plot, so that its text can be read on a phone, where it is drawn at 0.85 of its size."""

_LEFT, _RIGHT = 46, 412
_ROW = 50
_MAX_POINTS, _MAX_STEPS, _MAX_MEANS = 1200, 240, 40
_WIDEST = 1.0  # an axis of differences ends at ±100 %

Marks = Mapping[str, Mapping[str, float]]
"""Bound → metric → difference to a."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Maps values to pixels."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def at(self, value: float) -> float:
        """Return the place of a value, at an end if it lies beyond."""
        low, high, value = (math.log10(x) if self.is_log else x for x in (self.low, self.high, value))
        share = (value - low) / (high - low) if high > low else 0.5
        return round(self.start + min(1.0, max(0.0, share)) * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        """Return some round values on the axis."""
        if self.is_log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            every = [base * 10.0**power for power in range(first, last + 1) for base in (1, 2, 5)]
            if last - first > 2:
                every = every[::3]
        else:
            step = _round_step((self.high - self.low) / 5)
            every = [step * n for n in range(math.floor(self.low / step), math.ceil(self.high / step) + 1)]
        return [tick for tick in every if self.low <= tick <= self.high * (1 + 1e-9)]


def forest(found: Comparison, marks: Marks) -> str:
    """Draw each metric's difference with its interval, and where the bounds are."""
    shown = [each for each in found.changes if each.shown is not None]
    if not shown:
        return ""
    axis, height = _axis_of(shown, marks), _ROW * len(shown) + 22
    parts = [_text(axis.at(tick), height - 6, _percent(tick), "tick middle") for tick in axis.ticks()]
    for row, each in enumerate(shown):
        top = _ROW * row
        parts += [_line(axis.at(tick), top + 21, axis.at(tick), top + 44, "grid") for tick in axis.ticks()]
        parts.append(_line(axis.at(0), top + 21, axis.at(0), top + 44, "zero"))
        parts += _forest_row(each, axis, top)
        for number, marked in enumerate(marks.values()):
            if abs(value := marked.get(each.metric.name, math.inf)) <= axis.high:
                parts.append(_mark(axis.at(value), top + 40, number))
    return _svg(height, parts, "differences with their intervals")


def _axis_of(shown: Seq[Change], marks: Marks) -> Axis:
    """Return an axis for all intervals of means; those of percentiles, wide as they are, may leave it."""
    ends = [abs(value) for marked in marks.values() for value in marked.values()]
    for each in shown:
        if each.shown is not None and each.metric.percentile is None:
            ends += [abs(each.shown.low), abs(each.shown.high)]
    reach = min(_WIDEST, max([0.002, *(1.15 * end for end in ends)]))
    return Axis(low=-reach, high=reach, start=12, end=WIDTH - 12)


def _forest_row(each: Change, axis: Axis, top: float) -> list[str]:
    estimate, y = each.shown, top + 28
    assert estimate is not None, "others are left out"
    is_better = (estimate.value > 0) == each.metric.is_more_better
    kind = ("better" if is_better else "worse") if estimate.is_clear else "unsure"
    parts = [
        _text(12, top + 14, each.metric.title, "label"),
        _text(WIDTH - 12, top + 14, f"{change_text(each)} ({interval_text(each)})", "value end"),
        _line(axis.at(estimate.low), y, axis.at(estimate.high), y, f"interval {kind}"),
    ]
    for end, sign in ((estimate.low, -1), (estimate.high, 1)):
        if abs(end) > axis.high:  # it goes on beyond the axis
            x = axis.at(end)
            parts.append(
                f'<polygon class="point {kind}" points="{x + 7 * sign},{y} {x},{y - 6} {x},{y + 6}"/>'
            )
    if abs(estimate.value) <= axis.high:
        parts.append(f'<circle class="point {kind}" cx="{axis.at(estimate.value)}" cy="{y}" r="4.5"/>')
    return parts


def marks_legend(names: Seq[str]) -> str:
    """Explain the marks of bounds."""
    keys = "".join(
        f'<li><svg class="key" viewBox="0 0 14 14">{_mark(7, 7, number)}</svg>{escape(name)}</li>'
        for number, name in enumerate(names)
    )
    return f'<ul class="legend">{keys}</ul>' if names else ""


def distributions(runs: Mapping[str, Column], what: str, *, is_log: bool) -> str:
    """Draw for each run the share of requests whose value is at most so large."""
    known = {name: np.sort(column[~np.isnan(column)]) for name, column in runs.items()}
    known = {name: values for name, values in known.items() if len(values)}
    if not known:
        return ""
    low, high = min(v[0] for v in known.values()), max(v[-1] for v in known.values())
    if is_log:
        positive = [v[v > 0] for v in known.values()]
        low = min((float(v[0]) for v in positive if len(v)), default=1e-3)
        high = max(high, 1.01 * low)
    x = Axis(low=float(low), high=float(high), start=_LEFT, end=_RIGHT, is_log=is_log)
    y = Axis(low=0, high=100, start=216, end=10)
    parts = [*_grid(x, y), _text((_LEFT + _RIGHT) / 2, 252, what, "title middle")]
    for index, values in enumerate(known.values()):
        places = np.unique(np.linspace(0, len(values) - 1, min(len(values), _MAX_STEPS)).round().astype(int))
        points = " ".join(
            f"{x.at(max(values[place], x.low))},{y.at(100 * (place + 1) / len(values))}" for place in places
        )
        parts.append(f'<polyline class="curve run{index}" points="{points}"/>')
    return _svg(260, parts, f"distribution: {what}")


def over_time(arrivals_s: Column, difference: Column, what: str, number: int) -> str:
    """Draw the difference of each request by its arrival, and the mean of those near it."""
    known = ~np.isnan(difference)
    if not known.any():
        return ""
    times, values = arrivals_s[known], difference[known]
    sizes = np.abs(values[values != 0])  # where most are 0, the others would lie outside
    reach = float(np.quantile(sizes, 0.99)) * 1.1 if len(sizes) else 1.0
    x = Axis(low=0.0, high=float(max(times[-1], 1e-9)), start=_LEFT, end=_RIGHT)
    y = Axis(low=-reach, high=reach, start=216, end=10)
    parts = [*_grid(x, y), _line(_LEFT, y.at(0), _RIGHT, y.at(0), "zero")]
    parts.append(_text((_LEFT + _RIGHT) / 2, 252, f"arrival (s); {what}", "title middle"))
    every = -(-len(values) // _MAX_POINTS)
    dots = "".join(
        f'<circle cx="{x.at(time)}" cy="{y.at(value)}" r="1.6"/>'
        for time, value in zip(times[::every], values[::every], strict=True)
    )
    parts.append(f'<g class="dots run{number}">{dots}</g>')
    groups = min(_MAX_MEANS, max(1, len(values) // 8))
    means = zip(np.array_split(times, groups), np.array_split(values, groups), strict=True)
    line = " ".join(f"{x.at(float(t.mean()))},{y.at(float(v.mean()))}" for t, v in means)
    parts.append(f'<polyline class="curve run{number}" points="{line}"/>')
    return _svg(260, parts, f"differences over time: {what}")


def _grid(x: Axis, y: Axis) -> Iterator[str]:
    for tick in y.ticks():
        yield _line(x.start, y.at(tick), x.end, y.at(tick), "grid")
        yield _text(x.start - 6, y.at(tick) + 4, _plain(tick), "tick end")
    for tick in x.ticks():
        yield _line(x.at(tick), y.start, x.at(tick), y.end, "grid")
        yield _text(x.at(tick), y.start + 16, _plain(tick), "tick middle")


def _svg(height: float, parts: Seq[str], label: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>'


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x}" y="{y}">{escape(text)}</text>'


def _mark(x: float, y: float, number: int) -> str:
    """Draw a hollow mark: a diamond, a square, a triangle, or one upside down."""
    shapes = ("0,-5 5,0 0,5 -5,0", "-4,-4 4,-4 4,4 -4,4", "0,-5 5,4 -5,4", "0,5 5,-4 -5,-4")
    return f'<polygon class="bound" transform="translate({x} {y})" points="{shapes[number % len(shapes)]}"/>'


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step)) if step > 0 else 1.0
    return next(base * power for base in (1, 2, 5, 10) if base * power >= step * (1 - 1e-9))


def _plain(value: float) -> str:
    return f"{value:,.6g}".replace("-", "−")


def _percent(value: float) -> str:
    return f"{_plain(round(100 * value, 6))} %"
