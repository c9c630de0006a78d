"""Limits that a switch of policies must keep, and the figures that they are compared with."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from sagellm.core import ConfigError, FinishReason
from sagellm.core.errors import nearest
from sagellm.engines.engine_core.sequence import Sequence
from sagellm.engines.metrics.latency import percentile, tpot_s

MAX_KEPT = 8192
"""Requests that are remembered after their end."""

_LIMIT = re.compile(r"\s*([a-z0-9_]+)\s*(<=|>=)\s*([+-]?)\s*([0-9.]+)\s*(%?)\s*")


class Ended(NamedTuple):
    """What became of a request."""

    finished_ns: int
    arrival_ns: int
    first_token_ns: int | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int
    has_failed: bool


class Window(NamedTuple):
    """What a limit is compared with: the requests that ended in it, and times to first tokens in it."""

    ended: list[Ended]
    ttfts_s: list[float]  # of those whose first token came in it, whether or not they have ended


def _mean(values: list[float]) -> float | None:
    return fmean(values) if values else None


def _p99(values: list[float]) -> float | None:
    return percentile(sorted(values), 99) if values else None


def _tpots_ms(window: Window) -> list[float]:
    found = (
        tpot_s(one.first_token_ns, one.finished_ns, one.num_output_tokens)
        for one in window.ended
        if one.first_token_ns is not None
    )
    return [1e3 * each for each in found if each is not None]


def _latencies_s(window: Window) -> list[float]:
    return [(one.finished_ns - one.arrival_ns) / 1e9 for one in window.ended if not one.has_failed]


def _hit_rate(window: Window) -> float | None:
    num_prompt = sum(one.num_prompt_tokens for one in window.ended)
    return sum(one.num_cached_tokens for one in window.ended) / num_prompt if num_prompt else None


METRICS: Mapping[str, tuple[str, str, Callable[[Window], float | None]]] = {
    "ttft_mean_s": ("<=", "mean time to the first token", lambda window: _mean(window.ttfts_s)),
    "ttft_p99_s": ("<=", "99th percentile of it", lambda window: _p99(window.ttfts_s)),
    "tpot_mean_ms": ("<=", "mean time per token after the first", lambda window: _mean(_tpots_ms(window))),
    "tpot_p99_ms": ("<=", "99th percentile of it", lambda window: _p99(_tpots_ms(window))),
    "latency_mean_s": ("<=", "mean time from arrival to end", lambda window: _mean(_latencies_s(window))),
    "latency_p99_s": ("<=", "99th percentile of it", lambda window: _p99(_latencies_s(window))),
    "hit_rate": (">=", "prompt tokens reused ÷ prompt tokens", _hit_rate),
    "error_rate": (
        "<=",
        "requests that failed ÷ requests",
        lambda window: _mean([float(one.has_failed) for one in window.ended]),
    ),
    "preemptions_per_request": (
        "<=",
        "preemptions ÷ requests",
        lambda window: _mean([float(one.num_preemptions) for one in window.ended]),
    ),
}
"""What can be limited: the side on which it must stay, what it is, and how it is computed."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """One limit, in the unit of its metric."""

    text: str
    metric: str
    value: float

    @classmethod
    def read(cls, text: str, before: Window) -> Limit:
        """Read `ttft_p99_s<=0.5`, or `hit_rate>=-2%`: relative to what it was before.

        Raises ConfigError for anything else, and for a relative limit if nothing is known of before.
        """
        found = _LIMIT.fullmatch(text)
        if found is None:
            raise ConfigError(
                f"the guard {text!r} cannot be read; write ttft_p99_s<=0.5 or, relative to what it is now, "
                "hit_rate>=-2%"
            )
        metric, side, sign, digits, percent = found.groups()
        if metric not in METRICS:
            raise ConfigError(
                f"the guard {text!r} limits {metric!r}; what can be limited is {', '.join(METRICS)}."
                f"{nearest(metric, METRICS)}"
            )
        wanted, _, compute = METRICS[metric]
        if side != wanted:
            raise ConfigError(f"the guard {text!r} is the wrong way round; write {metric}{wanted}…")
        try:
            value = float(sign + digits)
        except ValueError:
            raise ConfigError(f"the guard {text!r} has no number {digits!r}") from None
        if percent:
            now = compute(before)
            if now is None:
                raise ConfigError(
                    f"the guard {text!r} is relative, and no request ended lately to compare with; give an "
                    f"absolute limit, such as {metric}{side}0.5"
                )
            value = now * (1 + value / 100)
        return cls(text="".join(text.split()), metric=metric, value=value)

    def breach(self, window: Window) -> str | None:
        """Say how the limit is broken; None if it is kept."""
        side, _, compute = METRICS[self.metric]
        now = compute(window)
        if now is None or (now <= self.value if side == "<=" else now >= self.value):
            return None
        return f"{self.metric} was {now:.4g}, {side} {self.value:.4g} was wanted"


@dataclass(frozen=True, kw_only=True)
class Guard:
    """Limits that hold from a switch on, for the requests of the latest `window_s` since then."""

    limits: tuple[Limit, ...]
    window_s: float
    min_requests: int
    since_ns: int

    def breach(self, requests: LatestRequests, live: Iterable[Sequence], now_ns: int) -> str | None:
        """Say which limit is broken, and by how many requests; None if none is, or too few are known."""
        begin_ns = max(self.since_ns, now_ns - round(self.window_s * 1e9))
        limit_s = max(
            (each.value for each in self.limits if each.metric.startswith("ttft")), default=math.inf
        )
        window = requests.window(begin_ns, live, now_ns, longest_s=limit_s)
        num_requests = max(len(window.ended), len(window.ttfts_s))
        if num_requests < self.min_requests:
            return None
        for limit in self.limits:
            if (told := limit.breach(window)) is not None:
                return f"{told}, over {num_requests} requests"
        return None


class LatestRequests:
    """The requests that ended last, for windows of time."""

    def __init__(self) -> None:
        self._ended: deque[Ended] = deque(maxlen=MAX_KEPT)

    def add(self, sequence: Sequence, reason: FinishReason, finished_ns: int) -> None:
        """Note how a sequence ended; one that its client aborted says nothing."""
        if reason == "abort":
            return
        request = sequence.request
        self._ended.append(
            Ended(
                finished_ns,
                request.arrival_ns,
                sequence.first_token_ns,
                len(request.token_ids),
                sequence.num_cached_tokens or 0,
                sequence.num_output_tokens,
                sequence.num_preemptions,
                reason in ("error", "deadline"),
            )
        )

    def window(
        self, begin_ns: int, live: Iterable[Sequence], now_ns: int, *, longest_s: float = math.inf
    ) -> Window:
        """Return what happened since a moment.

        A request that has waited for its first token for more than `longest_s` counts with the time so far.
        """
        ended: list[Ended] = []
        for one in reversed(self._ended):
            if one.finished_ns < begin_ns:
                break
            ended.append(one)
        firsts = [(one.arrival_ns, one.first_token_ns) for one in ended]
        firsts += [(each.request.arrival_ns, each.first_token_ns) for each in live]
        ttfts_s = []
        for arrival_ns, first_ns in firsts:
            if first_ns is None:
                if (age_s := (now_ns - arrival_ns) / 1e9) > longest_s:
                    ttfts_s.append(age_s)
            elif first_ns >= begin_ns:
                ttfts_s.append((first_ns - arrival_ns) / 1e9)
        return Window(ended, ttfts_s)
