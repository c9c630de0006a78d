"""Admission control: a bounded number of live sequences, and no new ones while draining."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from sagellm.core import DEFAULT_TENANT
from sagellm.server.http.errors import APIError


class Quota(NamedTuple):
    """The most that the live requests of a tenant may add up to; None: no limit of its own."""

    max_requests: int | None = None  # sequences
    max_tokens: int | None = None  # of prompts, and that may be generated


NO_QUOTA = Quota()


@dataclass(slots=True)
class TenantUse:
    """What a tenant's live requests add up to, and how many of its requests were refused, by code."""

    quota: Quota = NO_QUOTA
    num_live: int = 0  # sequences
    num_tokens: int = 0
    num_refused: Counter[str] = field(default_factory=Counter)

    def refuse(self, code: str, reason: str, *, lower: str = "") -> APIError:
        """Count a request and return its answer; `lower` says what to give a lower value if it never fits."""
        self.num_refused[code] += 1
        advice = f"it never fits: give a lower {lower}" if lower else "try again later"
        return APIError(429, f"{reason}; {advice}", code=code, is_final=bool(lower))


class Admission:
    """Counts the sequences of live requests. Everything beyond `limit` is refused at once with 429.

    With several tenants, each may hold as many sequences as it leaves free, at least one: a tenant alone
    takes half of the limit, and k that take all they can leave 1 ÷ (k + 1) of it to the next one (dynamic
    thresholds, Choudhury and Hahne, 1998). A quota makes that less, never more.
    """

    def __init__(self, limit: int, quotas: Mapping[str, Quota] | None = None) -> None:
        """Start empty. `quotas` are by tenant; without any, all requests are the default tenant's."""
        self.limit = limit
        self.num_live = 0
        self.is_draining = False
        self._stopped: APIError | None = None  # what all requests end with, once the time to drain is over
        given = quotas or {DEFAULT_TENANT.name: NO_QUOTA}
        self.tenants = {name: TenantUse(quota) for name, quota in given.items()}
        self._seats: set[Seat] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def seat(self, tenant: str = DEFAULT_TENANT.name) -> Iterator[Seat]:
        """Hold a seat for a request while it is read; the request takes further seats itself.

        Raises APIError, 429 when full and 503 when draining.
        """
        if self.is_draining:
            raise APIError(503, "the server is shutting down", code="shutting_down")
        seat = Seat(self, self.tenants[tenant])
        seat.take(1)
        self._seats.add(seat)
        try:
            yield seat
        finally:
            self._seats.remove(seat)
            seat._release()
            if not self.num_live:
                self._idle.set()

    def _take(self, use: TenantUse, num_more: int, num_tokens: int, *, num_held: int) -> None:
        others, own, total = self.num_live - num_held, use.num_live + num_more, self.num_live + num_more
        quota, free = use.quota, self.limit - total
        told = f"{use.num_live - num_held} sequences of this key are waiting or running"
        if quota.max_requests is not None and own > quota.max_requests:
            never_fits = num_held + num_more > quota.max_requests
            raise use.refuse(
                "tenant_queue_full",
                f"{told}; with the {num_held + num_more} of this request that is more than its "
                f"{quota.max_requests}",
                lower="n, best_of or the number of prompts" if never_fits else "",
            )
        if quota.max_tokens is not None and use.num_tokens + num_tokens > quota.max_tokens:
            never_fits = num_tokens > quota.max_tokens
            raise use.refuse(
                "tenant_tokens_full",
                f"the live requests of this key have {use.num_tokens} tokens with those to generate; "
                f"with the {num_tokens} of this one that is more than its {quota.max_tokens}",
                lower="max_tokens, n, best_of or the length of the prompt" if never_fits else "",
            )
        if len(self.tenants) > 1 and others and own > max(1, free):
            raise use.refuse(
                "tenant_queue_full",
                f"{told}, with the {num_held + num_more} of this request that is more than the "
                f"{max(0, free)} that remain for other keys",
            )
        if others and free < 0:
            raise use.refuse("queue_full", f"{others} sequences are waiting or running")
        self.num_live = total
        use.num_live = own
        use.num_tokens += num_tokens
        self._idle.clear()

    def start_draining(self) -> None:
        """Accept no more requests; running ones continue."""
        self.is_draining = True

    def stop_all(self) -> None:
        """End every live request: the time to drain is over."""
        self._stopped = APIError(503, "the server is shutting down", code="shutting_down")
        for seat in self._seats:
            if seat.stop is not None:
                seat.stop(self._stopped)

    async def wait_idle(self) -> None:
        """Return when no request is live."""
        await self._idle.wait()


class Seat:
    """The seats that one request holds."""

    def __init__(self, admission: Admission, use: TenantUse) -> None:
        self._admission, self._use = admission, use
        self.num_held = self._num_tokens = 0
        self.stop: Callable[[Exception], None] | None = None  # ends the request, once it runs

    def run(self, stop: Callable[[Exception], None]) -> None:
        """Record how the request is ended, which begins to run. Raises APIError if all have been ended."""
        if self._admission._stopped is not None:
            raise self._admission._stopped
        self.stop = stop

    def take(self, num_sequences: int, num_tokens: int = 0) -> None:
        """Hold this many in total. A request with more sequences than seats is admitted only when alone."""
        num_more = num_sequences - self.num_held
        self._admission._take(self._use, num_more, num_tokens - self._num_tokens, num_held=self.num_held)
        self.num_held, self._num_tokens = num_sequences, num_tokens

    def _release(self) -> None:
        self._admission.num_live -= self.num_held
        self._use.num_live -= self.num_held
        self._use.num_tokens -= self._num_tokens
