"""The figures of a simulated run, named and defined as in the core's metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

from sagellm.core import ConfigError
from sagellm.engines.metrics.cache import re_prefill_rate, token_hit_rate
from sagellm.engines.metrics.latency import percentile, throughput, total_throughput, tpot_s
from sagellm.lab.simulation.served_load import ServedRequest

Key = TypeVar("Key")


@dataclass(frozen=True, kw_only=True)
class ServingLimits:
    """What a request must meet to count as good.

    Its first token within `ttft_s` seconds + `ttft_prefills` × what its prompt alone takes on the cost model,
    computed whole; and at most `tpot_ms` milliseconds per token after it.
    """

    ttft_s: float = 2.0
    ttft_prefills: float = 3.0
    tpot_ms: float = 50.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value >= 0:
                raise ConfigError(f"{name} is {value}; it must be at least 0")


@dataclass(frozen=True, kw_only=True)
class Tail:
    """Mean, median, tail and maximum, in the unit of the values."""

    mean: float
    p50: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Seq[float]) -> Tail | None:
        """Summarise values; None if there are none."""
        if not values:
            return None
        ordered = sorted(values)
        return cls(
            mean=fmean(ordered), p50=percentile(ordered, 50), p99=percentile(ordered, 99), max=ordered[-1]
        )


@dataclass(frozen=True, kw_only=True)
class GroupFigures:
    """The requests of one tenant, or of one priority."""

    num_requests: int
    num_good: int
    ttft_s: Tail | None
    tpot_s: Tail | None
    queueing_s: Tail | None
    token_hit_rate: float


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What a run counted besides its requests."""

    busy_s: float  # in steps
    num_steps: int
    num_computed_tokens: int
    batching_efficiency: float | None
    lowered_batching_efficiency: float | None
    jains_index: float | None


@dataclass(frozen=True, kw_only=True)
class ServingFigures(Counts, GroupFigures):
    """One run. Rates are over the time from the first arrival to the end of the last request."""

    num_failed: int
    num_cut: int  # whose recorded output is longer than the limit that they stated
    duration_s: float
    num_preemptions: int
    goodput_requests_per_s: float
    request_throughput_per_s: float
    output_throughput_tokens_per_s: float
    total_throughput_tokens_per_s: float
    re_prefill_rate: float
    by_tenant: dict[str, GroupFigures]
    by_priority: dict[int, GroupFigures]


def serving_figures(
    served: Seq[ServedRequest],
    counts: Counts,
    limits: ServingLimits,
    prefill_ns: Callable[[int], float],
) -> ServingFigures:
    """Compute the figures. `prefill_ns` says what a prompt of so many tokens takes alone.

    A request that failed is never good and has no times. Recomputed tokens are those beyond what requests
    need without preemption (not counted if a request failed), and those of prompts that had been cached
    before, but no longer at admission.
    """
    done = [one for one in served if one.error is None]
    start_ns = min(one.arrival_ns for one in served)
    end_ns = max((one.finished_ns or 0 for one in served), default=0)
    clock = {"start_ns": start_ns, "end_ns": max(end_ns, start_ns + 1)}
    num_prompt = sum(one.num_prompt_tokens for one in done)
    num_output = sum(one.num_output_tokens for one in done)
    num_needed = num_prompt + num_output - len(done) - sum(one.num_cached_tokens for one in done)
    num_recomputed = counts.num_computed_tokens - num_needed if len(done) == len(served) else 0
    num_recomputed += sum(one.num_recomputed_tokens for one in done)
    group = _group(served, limits, prefill_ns)
    return ServingFigures(
        **vars(group),
        **vars(counts),
        num_failed=len(served) - len(done),
        num_cut=sum(one.is_cut for one in served),
        duration_s=(clock["end_ns"] - start_ns) / 1e9,
        num_preemptions=sum(one.num_preemptions for one in served),
        goodput_requests_per_s=throughput(group.num_good, **clock),
        request_throughput_per_s=throughput(len(done), **clock),
        output_throughput_tokens_per_s=throughput(num_output, **clock),
        total_throughput_tokens_per_s=total_throughput(num_prompt, num_output, **clock),
        re_prefill_rate=re_prefill_rate(num_recomputed, counts.num_computed_tokens),
        by_tenant=_by(served, lambda one: one.tenant, limits, prefill_ns),
        by_priority=_by(served, lambda one: one.priority, limits, prefill_ns),
    )


def is_good(one: ServedRequest, limits: ServingLimits, prefill_ns: Callable[[int], float]) -> bool:
    """Say whether a request met the limits."""
    if one.error is not None or one.first_token_ns is None or one.finished_ns is None:
        return False
    most_ns = 1e9 * limits.ttft_s + limits.ttft_prefills * prefill_ns(one.num_prompt_tokens)
    tpot = tpot_s(one.first_token_ns, one.finished_ns, one.num_output_tokens)
    is_soon = one.first_token_ns - one.arrival_ns <= most_ns
    return is_soon and (tpot is None or 1e3 * tpot <= limits.tpot_ms)


def _by(
    served: Seq[ServedRequest],
    key: Callable[[ServedRequest], Key],
    limits: ServingLimits,
    prefill_ns: Callable[[int], float],
) -> dict[Key, GroupFigures]:
    groups: dict[Key, list[ServedRequest]] = {}
    for one in served:
        groups.setdefault(key(one), []).append(one)
    if len(groups) < 2:
        return {}
    return {name: _group(group, limits, prefill_ns) for name, group in groups.items()}


def _group(
    served: Seq[ServedRequest], limits: ServingLimits, prefill_ns: Callable[[int], float]
) -> GroupFigures:
    ttfts, tpots, queueing = [], [], []
    num_cached = num_prompt = num_good = 0
    for one in served:
        if one.error is not None or one.first_token_ns is None or one.finished_ns is None:
            continue
        ttfts.append((one.first_token_ns - one.arrival_ns) / 1e9)
        tpot = tpot_s(one.first_token_ns, one.finished_ns, one.num_output_tokens)
        if tpot is not None:
            tpots.append(tpot)
        if one.scheduled_ns is not None:
            queueing.append((one.scheduled_ns - one.arrival_ns) / 1e9)
        num_cached += one.num_cached_tokens
        num_prompt += one.num_prompt_tokens
        num_good += is_good(one, limits, prefill_ns)
    return GroupFigures(
        num_requests=len(served),
        num_good=num_good,
        ttft_s=Tail.of(ttfts),
        tpot_s=Tail.of(tpots),
        queueing_s=Tail.of(queueing),
        token_hit_rate=token_hit_rate(num_cached, num_prompt),
    )
