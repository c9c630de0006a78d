"""Limits that a switch of policies must keep, and the figures that they are compared with."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

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
    scheduled_ns: int | None
    first_token_ns: int | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int
    has_failed: bool


class Window(NamedTuple):
    """What a limit is compared with: what happened to requests since some moment."""

    admitted_since_ns: int  # a hit rate is of requests that were first scheduled from then on
    ended: list[Ended]
    ttfts_s: list[float]  # of those whose first token came in it, whether or not they have ended
    waits_s: list[float]  # of those without a first token: so far, or until they ended


def _p99(values: list[float]) -> float:
    return percentile(sorted(values), 99)


def _rate(hits: list[tuple[int, int]]) -> float:
    return sum(cached for cached, _ in hits) / max(sum(prompt for _, prompt in hits), 1)


def _ttfts_s(window: Window, limit: float) -> list[float]:
    return window.ttfts_s + [each for each in window.waits_s if each > limit]


def _tpots_ms(window: Window, limit: float) -> list[float]:
    del limit
    found = (
        tpot_s(one.first_token_ns, one.finished_ns, one.num_output_tokens)
        for one in window.ended
        if one.first_token_ns is not None
    )
    return [1e3 * each for each in found if each is not None]


def _latencies_s(window: Window, limit: float) -> list[float]:
    del limit
    return [(one.finished_ns - one.arrival_ns) / 1e9 for one in window.ended if not one.has_failed]


def _hits(window: Window, limit: float) -> list[tuple[int, int]]:
    del limit
    return [
        (one.num_cached_tokens, one.num_prompt_tokens)
        for one in window.ended
        if one.scheduled_ns is not None and one.scheduled_ns >= window.admitted_since_ns
    ]


class Metric(NamedTuple):
    """What can be limited: the side on which it must stay, and how it is computed from which requests."""

    side: str
    values: Callable[[Window, float], list[Any]]  # of a window, for a limit
    figure: Callable[[list[Any]], float]


METRICS: Mapping[str, Metric] = {
    "ttft_mean_s": Metric("<=", _ttfts_s, fmean),
    "ttft_p99_s": Metric("<=", _ttfts_s, _p99),
    "tpot_mean_ms": Metric("<=", _tpots_ms, fmean),
    "tpot_p99_ms": Metric("<=", _tpots_ms, _p99),
    "latency_mean_s": Metric("<=", _latencies_s, fmean),
    "latency_p99_s": Metric("<=", _latencies_s, _p99),
    "hit_rate": Metric(">=", _hits, _rate),
    "error_rate": Metric("<=", lambda window, _: [one.has_failed for one in window.ended], fmean),
    "preemptions_per_request": Metric(
        "<=", lambda window, _: [one.num_preemptions for one in window.ended], fmean
    ),
}


_SHARES = ("hit_rate", "error_rate")


@dataclass(frozen=True, kw_only=True)
class Limit:
    """One limit, in the unit of its metric."""

    text: str
    metric: str
    value: float

    @classmethod
    def read(cls, text: str, before: Window, min_requests: int) -> Limit:
        """Read `ttft_p99_s<=0.5`, or `hit_rate>=-2%`: relative to what it was before.

        Raises ConfigError for anything else, and if too few requests are known for a relative limit.
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
        if side != (wanted := METRICS[metric].side):
            raise ConfigError(f"the guard {text!r} is the wrong way round; write {metric}{wanted}…")
        if bool(sign) != bool(percent):
            raise ConfigError(
                f"the guard {text!r} has {'a sign without %' if sign else '% without a sign'}; write "
                f"{metric}{side}{'-' if side == '>=' else '+'}5% for a limit relative to now, or "
                f"{metric}{side}0.05 for an absolute one"
            )
        try:
            value = float(sign + digits)
        except ValueError:
            raise ConfigError(f"the guard {text!r} has no number {digits!r}") from None
        if percent:
            value = cls._relative(text, metric, value, before, min_requests)
        elif metric in _SHARES and value > 1:
            raise ConfigError(
                f"the guard {text!r} limits a share, which is at most 1; write {metric}{side}0.2"
            )
        return cls(text="".join(text.split()), metric=metric, value=value)

    @staticmethod
    def _relative(text: str, metric: str, percent: float, before: Window, min_requests: int) -> float:
        side, values, figure = METRICS[metric]
        known = values(before, math.inf)
        if len(known) < min_requests:
            raise ConfigError(
                f"the guard {text!r} is relative to what was before, which needs {min_requests} requests, "
                f"and {len(known)} are known of the window; send some first, widen the window, ask for fewer "
                f"requests, or give an absolute limit, such as {metric}{side}0.5"
            )
        if not (now := figure(known)):
            raise ConfigError(
                f"the guard {text!r} is relative, and {metric} is 0 now; give an absolute limit, such as "
                f"{metric}{side}0.05"
            )
        return now * (1 + percent / 100)

    def now(self, window: Window) -> tuple[float | None, int]:
        """Return the metric, None if no request is known, and of how many requests it is."""
        _, values, figure = METRICS[self.metric]
        known = values(window, self.value)
        return (figure(known) if known else None), len(known)

    def breach(self, window: Window, min_requests: int) -> str | None:
        """Say how the limit is broken, and by how many requests; None if it is kept, or too few are known."""
        side, (now, num_requests) = METRICS[self.metric].side, self.now(window)
        if now is None or num_requests < min_requests:
            return None
        if now <= self.value if side == "<=" else now >= self.value:
            return None
        return (
            f"{self.metric} was {now:.4g} over {num_requests} requests; the limit is {side} {self.value:.4g}"
        )


@dataclass(frozen=True, kw_only=True)
class Guard:
    """Limits that hold from a switch on, for the requests of the latest `window_s` since then."""

    limits: tuple[Limit, ...]
    window_s: float
    min_requests: int
    since_ns: int

    def window(self, requests: LatestRequests, live: Iterable[Sequence], now_ns: int) -> Window:
        """Return what the limits are compared with."""
        begin_ns = max(self.since_ns, now_ns - round(self.window_s * 1e9))
        return requests.window(begin_ns, live, now_ns, admitted_since_ns=self.since_ns)

    def breach(self, requests: LatestRequests, live: Iterable[Sequence], now_ns: int) -> str | None:
        """Say which limit is broken; None if none is, or too few requests are known."""
        window = self.window(requests, live, now_ns)
        found = (limit.breach(window, self.min_requests) for limit in self.limits)
        return next((told for told in found if told is not None), None)


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
                sequence.scheduled_ns,
                sequence.first_token_ns,
                len(request.token_ids),
                sequence.num_cached_tokens or 0,
                sequence.num_output_tokens,
                sequence.num_preemptions,
                reason in ("error", "deadline"),
            )
        )

    def window(
        self, begin_ns: int, live: Iterable[Sequence], now_ns: int, *, admitted_since_ns: int = 0
    ) -> Window:
        """Return what happened since a moment."""
        ended: list[Ended] = []
        for one in reversed(self._ended):
            if one.finished_ns < begin_ns:
                break
            ended.append(one)
        firsts = [(one.arrival_ns, one.first_token_ns, one.finished_ns) for one in ended]
        firsts += [(each.request.arrival_ns, each.first_token_ns, now_ns) for each in live]
        ttfts_s, waits_s = [], []
        for arrival_ns, first_ns, until_ns in firsts:
            if first_ns is None:
                waits_s.append((until_ns - arrival_ns) / 1e9)
            elif first_ns >= begin_ns:
                ttfts_s.append((first_ns - arrival_ns) / 1e9)
        return Window(admitted_since_ns, ended, ttfts_s, waits_s)
