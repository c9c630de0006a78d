"""Latency and throughput, from timestamps of one monotonic clock in nanoseconds. Results are in seconds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from sagellm.core.errors import InvalidInputError


def percentile(values: Iterable[float], percent: float) -> float:
    """Return the value that `percent` % of the values do not exceed, in their unit.

    Linear interpolation between the two nearest ranks: rank = percent ÷ 100 · (n − 1) of the
    sorted values, counted from 0 (numpy's default, R's type 7). Raises InvalidInputError for no
    values or a percent outside 0 … 100.
    """
    ordered = sorted(values)
    if not ordered or not 0 <= percent <= 100:
        raise InvalidInputError(
            f"{percent} % of {len(ordered)} values; needs 0 to 100 % of at least one value"
        )
    rank = percent / 100 * (len(ordered) - 1)
    lower = math.floor(rank)
    upper = min(lower + 1, len(ordered) - 1)
    return ordered[lower] + (ordered[upper] - ordered[lower]) * (rank - lower)


def _seconds(start_ns: int, end_ns: int, what: str) -> float:
    if end_ns < start_ns:
        raise InvalidInputError(f"{what}: ends at {end_ns} ns, before its start at {start_ns} ns")
    return (end_ns - start_ns) / 1e9


def ttft_s(arrival_ns: int, first_token_ns: int) -> float:
    """TTFT = first output token visible to the caller − request arrival, in seconds."""
    return _seconds(arrival_ns, first_token_ns, "TTFT")


def tpot_s(first_token_ns: int, last_token_ns: int, num_output_tokens: int) -> float | None:
    """TPOT = (last token time − first token time) ÷ (output tokens − 1), in seconds.

    None for fewer than two tokens.
    """
    duration_s = _seconds(first_token_ns, last_token_ns, "TPOT")
    return duration_s / (num_output_tokens - 1) if num_output_tokens > 1 else None


def itl_s(token_times_ns: Sequence[int]) -> list[float]:
    """ITL = gaps between consecutive output tokens of one request, in seconds; report p50 and p99."""
    return [_seconds(earlier, later, "ITL") for earlier, later in pairwise(token_times_ns)]


def throughput(num_output_tokens: int, start_ns: int, end_ns: int) -> float:
    """Throughput = output tokens ÷ wall time of the whole run, in tokens per second."""
    return _rate(num_output_tokens, start_ns, end_ns, "throughput")


def total_throughput(num_prompt_tokens: int, num_output_tokens: int, start_ns: int, end_ns: int) -> float:
    """Total throughput = (prompt + output tokens) ÷ wall time of the whole run, in tokens per second."""
    return _rate(num_prompt_tokens + num_output_tokens, start_ns, end_ns, "total throughput")


def _rate(count: int, start_ns: int, end_ns: int, what: str) -> float:
    if end_ns == start_ns:
        raise InvalidInputError(f"{what}: the run took no time, from {start_ns} to {end_ns} ns")
    return count / _seconds(start_ns, end_ns, what)


@dataclass(frozen=True, kw_only=True)
class RequestTimes:
    """When one request came and its tokens went out, in nanoseconds of one monotonic clock."""

    arrival_ns: int
    first_token_ns: int
    last_token_ns: int
    num_output_tokens: int


def goodput(
    requests: Iterable[RequestTimes], *, max_ttft_s: float, max_tpot_s: float, start_ns: int, end_ns: int
) -> float:
    """Goodput = requests that met the stated TTFT and TPOT limits ÷ wall time, in requests per second.

    A request of one token has no TPOT and meets that limit.
    """
    num_met = 0
    for request in requests:
        tpot = tpot_s(request.first_token_ns, request.last_token_ns, request.num_output_tokens)
        is_soon = ttft_s(request.arrival_ns, request.first_token_ns) <= max_ttft_s
        num_met += is_soon and (tpot is None or tpot <= max_tpot_s)
    return _rate(num_met, start_ns, end_ns, "goodput")
