"""Figures, differences and verdicts as people read them."""

from __future__ import annotations

from collections.abc import Iterator
from math import log1p
from typing import TYPE_CHECKING

from sagellm.lab.ab.bootstrap import BlockBootstrap, Estimate, num_requests_for
from sagellm.lab.ab.comparison import Change, Comparison
from sagellm.lab.ab.metrics import Metric

if TYPE_CHECKING:
    from sagellm.lab.ab.study import Study

SMALL = 0.01
"""The difference, a percent or a point, of which a verdict says how many requests would show it."""

_ASSUMED_BLOCKS = "what the memory in the costs holds; --num-blocks is what your server has"

_NO_QUEUE = "where hardly any request waits, fewer --num-blocks or --stretch 0.1 make a queue"
_CACHE_ALONE = (
    "without --cost only the cache is replayed: order, share, preempt, chunk and predictor decide nothing "
    "there, and eviction only where prompts that come back would not all fit into --num-blocks"
)
"""Why runs are identical, as far as a user can do something about it."""

_LARGE = 2.0
"""From this relative difference on, people read times rather than percents."""


def figure_text(metric: Metric, value: float | None) -> str:
    """Write a figure in the unit of its metric."""
    if value is None:
        return "-"
    unit = "ms" if metric.unit == "s" and value < 1 else metric.unit
    scale, digits = {"s": (1.0, 3), "ms": (1e3, 1), "%": (100.0, 1)}[unit]
    return f"{scale * value:,.{digits}f} {unit}"


def figure_rows(study: Study) -> list[tuple[str, ...]]:
    """Return a row for each run, then for each bound: what it is, and its figures, a dash for none."""
    labels = [each.label for each in study.runs] + [f"{each.name} ({each.text})" for each in study.bounds]
    return [
        (
            label,
            *(
                figure_text(each, each.of(run.columns) if each.column in run.columns else None)
                for each in study.plan.metrics
            ),
        )
        for label, run in zip(labels, [*study.runs, *study.bounds], strict=True)
    ]


def change_text(change: Change) -> str:
    """Write a difference: `−3.1 %`, or `+2.1 points` of a share."""
    if change.shown is not None:
        return _signed(change.shown.value, change.metric, _digits(change.shown))
    if change.a is None or change.b is None:
        return "-"
    if change.metric.is_share:
        return _signed(change.b - change.a, change.metric, 1)
    return _signed(change.b / change.a - 1, change.metric, 1) if change.a else "-"


def interval_text(change: Change) -> str:
    """Write an interval: `−4.2 to −1.9 %`."""
    estimate = change.shown
    if estimate is None:
        return "-"
    digits = _digits(estimate)
    return f"{_number(estimate.low, digits)} to {_signed(estimate.high, change.metric, digits)}"


def change_rows(found: Comparison) -> list[tuple[str, ...]]:
    """Return a row for each metric: its title, the figures of both, the difference and its interval."""
    return [
        (
            each.metric.title,
            figure_text(each.metric, each.a),
            figure_text(each.metric, each.b),
            change_text(each),
            interval_text(each),
        )
        for each in found.changes
    ]


def verdict(compared: Comparison, headline: Metric, bootstrap: BlockBootstrap, num_requests: int) -> str:
    """Say in a sentence whether b differs from a in the headline, and how sure that is."""
    name, title = compared.run.name, headline.title
    if compared.is_identical:
        if compared.is_same_configuration:
            return f"{name} has the same configuration as a: every request came out the same"
        hint = _NO_QUEUE if "ttft_s" in compared.run.columns else _CACHE_ALONE
        return f"{name} is identical to a: every request came out the same; {hint}"
    change = next(each for each in compared.changes if each.metric == headline)
    if not bootstrap.can_tell:
        few = f"{bootstrap.num_sessions} sessions are too few for an interval"
        return f"{name}: {change_text(change)} {title}; {few}"
    if change.shown is None:
        return f"{name}: {title} cannot be compared: it is zero or unknown in a or {name}"
    interval = f"95 %: {interval_text(change)}"
    if not change.shown.is_clear:
        needed = _needed(change, num_requests, bootstrap.level)
        found = f"no sure difference in {title} at this size: {change_text(change)}"
        return f"{name}: {found} ({interval}); {needed}"
    return f"{name} {_clear(change)}"


def _clear(change: Change) -> str:
    """Say how b differs, without signs: `is 3.1 % faster in mean TTFT (95 %: 1.9 to 4.2 %)`."""
    estimate, metric = change.shown, change.metric
    assert estimate is not None, "the difference is clear"
    is_more, digits = estimate.value > 0, _digits(estimate)
    if not metric.is_share and estimate.value >= _LARGE:
        value, low, high = (f"{1 + each:,.1f}" for each in (estimate.value, estimate.low, estimate.high))
        return f"takes {value} times as long in {metric.title} (95 %: {low} to {high} times)"
    ends = sorted(abs(100 * each) for each in (estimate.low, estimate.high))
    size, unit = f"{abs(100 * estimate.value):.{digits}f}", "points" if metric.is_share else "%"
    interval = f"95 %: {ends[0]:.{digits}f} to {ends[1]:.{digits}f} {unit}"
    if not metric.is_share:
        return f"is {size} % {'slower' if is_more else 'faster'} in {metric.title} ({interval})"
    figures = f"{figure_text(metric, change.b)} instead of {figure_text(metric, change.a)}"
    return f"has {size} points {'more' if is_more else 'fewer'} {metric.title}: {figures} ({interval})"


def about_load(study: Study) -> str:
    """Say what was run: the requests, the memory, and what steps cost."""
    plan, kv = study.plan, study.plan.variants[0].config.kv
    how = "the prefix cache alone"
    if plan.serving is not None:
        how = f"serving on virtual time; steps cost what is in a file: {plan.serving.costs.source}"
    assumed = f" ({_ASSUMED_BLOCKS})" if plan.has_assumed_blocks else ""
    return (
        f"{len(plan.source.requests):,} requests in {study.bootstrap.num_sessions:,} sessions, "
        f"{kv.num_blocks:,} blocks of {kv.block_size} tokens{assumed}; {how}"
    )


def notes(study: Study) -> Iterator[str]:
    """Yield what differs in memory, what was recorded, the missing bounds, and where requests failed."""
    a, *others = study.plan.variants
    for variant in others:
        if (num_tokens := variant.num_kv_tokens) != a.num_kv_tokens:
            yield f"{variant.name} has KV for {num_tokens:,} tokens, a for {a.num_kv_tokens:,}"
        if has := variant.not_named(a, is_served=study.plan.serving is not None):
            yield f"{variant.name} has {has} without naming it; a has another"
    if study.recorded:
        figures = (f"{each.metric.title} {figure_text(each.metric, each.a)}" for each in study.recorded)
        yield f"as recorded: {', '.join(figures)}"
    if not study.is_as_recorded:
        yield "a is not what was recorded: are --num-blocks, --cost and the policies those of that server?"
    yield from study.plan.without
    for run in study.runs:
        if run.num_failed:
            yield f"{run.name}: {run.num_failed:,} requests failed: {run.error}"


def about(bootstrap: BlockBootstrap, num_others: int, headline: Metric) -> str:
    """Say what the intervals are."""
    together = f", of all {num_others} together" if num_others > 1 else ""
    fewer = " Fewer variants have narrower ones." if num_others > 1 else ""
    return (
        f"The verdict is on {headline.title}; other metrics are described. Intervals (95 %{together}) are of "
        f"differences between the same requests, by a bootstrap of blocks of {bootstrap.block_len} sessions "
        f"that follow each other.{fewer}"
    )


def _needed(change: Change, num_requests: int, level: float) -> str:
    """Say how many more requests would show a small difference, and one as large as that which was found."""
    estimate = change.shown
    assert estimate is not None, "there is an interval"

    def missing(difference: float) -> int:
        size = difference if change.metric.is_share else log1p(difference)
        return num_requests_for(size, estimate, num_requests, level) - num_requests

    small = f"a difference of 1 {'point' if change.metric.is_share else '%'}"
    if missing(SMALL) <= 0:
        return f"{small} would have been found"
    if abs(estimate.value) < 2 * SMALL:
        return f"about {_rounded(missing(SMALL)):,} more requests would show {small}"
    as_large = f"about {_rounded(missing(estimate.value)):,} more requests would show one as large as this"
    return f"{as_large}, {_rounded(missing(SMALL)):,} {small}"


def _rounded(number: int) -> int:
    """Keep two digits: it is an estimate."""
    size = int(10 ** max(0, len(str(number)) - 2))
    return -(-number // size) * size


def _signed(value: float, metric: Metric, digits: int) -> str:
    return _number(value, digits) + (" points" if metric.is_share else " %")


def _number(value: float, digits: int) -> str:
    text = f"{100 * value:+,.{digits}f}".replace("-", "−")
    return text if text.strip("+−0.") else text.lstrip("+−")


def _digits(estimate: Estimate) -> int:
    """Return the digits that the interval's width gives a meaning; a clear one must not seem to end at 0."""
    ends_near_zero = min(abs(estimate.low), abs(estimate.high)) < 0.0005
    return 2 if estimate.high - estimate.low < 0.005 or (estimate.is_clear and ends_near_zero) else 1
