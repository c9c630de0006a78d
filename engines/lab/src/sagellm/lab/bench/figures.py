"""From records to figures, by the formulas of `sagellm.engines.metrics`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from sagellm.engines.metrics.cache import token_hit_rate
from sagellm.engines.metrics.latency import (
    goodput,
    itl_s,
    percentile,
    throughput,
    total_throughput,
    tpot_s,
    ttft_s,
)
from sagellm.lab.bench.driver import LoadRun
from sagellm.lab.bench.records import RequestRecord

_NUM_WINDOWS = 10


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How values are spread, in their unit."""

    mean: float
    min: float
    median: float
    p90: float
    p95: float
    p99: float
    max: float
    count: int


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a request must meet to count as good, in milliseconds; None means no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None


@dataclass(frozen=True, kw_only=True)
class ErrorCount:
    """How often one kind of failure occurred, and the first one's message."""

    count: int
    example: str


@dataclass(frozen=True, kw_only=True)
class ServeFigures:
    """What a load on a server measured. Tokens and times are those of requests that succeeded."""

    num_requests: int
    num_succeeded: int
    num_failed: int
    errors: dict[str, ErrorCount]
    duration_s: float
    max_running: int
    num_prompt_tokens: int
    num_cached_tokens: int | None  # None if the server does not say; likewise its share
    token_hit_rate: float | None
    num_output_tokens: int
    num_draft_tokens: int | None  # None if the server says of none
    draft_acceptance: float | None  # share of draft tokens that were accepted
    num_shorter_than_asked: int
    num_without_usage: int  # whose tokens are counted as events
    tokens_per_event: float | None
    request_throughput_per_s: float
    output_throughput_tokens_per_s: float
    total_throughput_tokens_per_s: float
    goodput_requests_per_s: float | None
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    itl_ms: Spread | None
    e2e_ms: Spread | None
    late_ms: Spread | None  # sending after the planned time
    output_tenths_tokens_per_s: Spread | None  # in each tenth of the run: how steady the throughput was


def spread(values: Iterable[float]) -> Spread | None:
    """Summarise values; None if there are none."""
    kept = sorted(values)
    if not kept:
        return None
    median, p90, p95, p99 = (percentile(kept, percent) for percent in (50, 90, 95, 99))
    return Spread(
        mean=fmean(kept),
        min=kept[0],
        median=median,
        p90=p90,
        p95=p95,
        p99=p99,
        max=kept[-1],
        count=len(kept),
    )


def serve_figures(run: LoadRun, limits: Limits | None = None) -> ServeFigures:
    """Compute all figures of a run."""
    good = [record for record in run.records if record.is_ok]
    times = [record.times for record in good]
    tpots = (tpot_s(one.first_token_ns, one.last_token_ns, one.num_output_tokens) for one in times)
    gaps = (gap for record in good for gap in itl_s(record.event_times_ns))
    num_prompt = sum(record.num_prompt_tokens for record in good)
    num_output = sum(record.num_output_tokens for record in good)
    num_events = sum(len(record.event_times_ns) for record in good)
    cached = [record.num_cached_tokens for record in good if record.num_cached_tokens is not None]
    drafts = sum(record.num_draft_tokens for record in good)
    accepted = sum(record.num_accepted_tokens for record in good)
    clock = {"start_ns": run.start_ns, "end_ns": max(run.end_ns, run.start_ns + 1)}
    return ServeFigures(
        num_requests=len(run.records),
        num_succeeded=len(good),
        num_failed=len(run.records) - len(good),
        errors=count_errors(run.records),
        duration_s=(run.end_ns - run.start_ns) / 1e9,
        max_running=run.max_running,
        num_prompt_tokens=num_prompt,
        num_cached_tokens=sum(cached) if cached else None,
        token_hit_rate=token_hit_rate(sum(cached), num_prompt) if cached else None,
        num_output_tokens=num_output,
        num_draft_tokens=drafts or None,
        draft_acceptance=accepted / drafts if drafts else None,
        num_shorter_than_asked=sum(one.num_output_tokens < one.num_asked_tokens for one in good),
        num_without_usage=sum(one.num_reported_tokens is None for one in good),
        tokens_per_event=num_output / num_events if num_events else None,
        request_throughput_per_s=throughput(len(good), **clock),
        output_throughput_tokens_per_s=throughput(num_output, **clock),
        total_throughput_tokens_per_s=total_throughput(num_prompt, num_output, **clock),
        goodput_requests_per_s=_goodput(good, limits, clock) if limits else None,
        ttft_ms=spread_ms(ttft_s(one.arrival_ns, one.first_token_ns) for one in times),
        tpot_ms=spread_ms(tpot for tpot in tpots if tpot is not None),
        itl_ms=spread_ms(gaps),
        e2e_ms=spread_ms((one.end_ns - one.arrival_ns) / 1e9 for one in good),
        late_ms=spread_ms(run.late_s),
        output_tenths_tokens_per_s=spread(
            rates_of_tenths((record.event_times_ns for record in good), **clock)
        ),
    )


def rates_of_tenths(times_ns: Iterable[Iterable[int]], *, start_ns: int, end_ns: int) -> list[float]:
    """Return the tokens (or events) per second in each tenth of a run, from the times of all requests."""
    counts = [0] * _NUM_WINDOWS
    span_ns = max(1, end_ns - start_ns)
    for times in times_ns:
        for moment_ns in times:
            counts[min(_NUM_WINDOWS - 1, max(0, (moment_ns - start_ns) * _NUM_WINDOWS // span_ns))] += 1
    return [count * _NUM_WINDOWS * 1e9 / span_ns for count in counts]


def count_errors(records: Sequence[RequestRecord]) -> dict[str, ErrorCount]:
    """Count failures by kind, the most frequent first."""
    found: dict[str, list[str]] = {}
    for record in records:
        if record.error_kind is not None:
            found.setdefault(record.error_kind, []).append(record.error or "")
    ordered = sorted(found.items(), key=lambda one: -len(one[1]))
    return {kind: ErrorCount(count=len(messages), example=messages[0]) for kind, messages in ordered}


def _goodput(good: Sequence[RequestRecord], limits: Limits, clock: dict[str, int]) -> float:
    def seconds(limit_ms: float | None) -> float:
        return float("inf") if limit_ms is None else limit_ms / 1e3

    in_time = (one for one in good if (one.end_ns - one.arrival_ns) / 1e9 <= seconds(limits.e2e_ms))
    return goodput(
        (record.times for record in in_time),
        max_ttft_s=seconds(limits.ttft_ms),
        max_tpot_s=seconds(limits.tpot_ms),
        **clock,
    )


def spread_ms(values_s: Iterable[float]) -> Spread | None:
    """Summarise seconds, in milliseconds."""
    return spread(value * 1e3 for value in values_s)
