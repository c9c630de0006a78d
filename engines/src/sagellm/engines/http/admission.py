"""Admission control: a bounded number of live sequences, and no new ones while draining."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sagellm.engines.http.errors import APIError


class Admission:
    """Counts the sequences of live requests. Everything beyond `limit` is refused at once with 429."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_live = 0
        self.is_draining = False
        self._seats: set[Seat] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def seat(self) -> Iterator[Seat]:
        """Hold a seat for a request while it is read; the request takes further seats itself.

        Raises APIError, 429 when full and 503 when draining.
        """
        if self.is_draining:
            raise APIError(503, "the server is shutting down", code="shutting_down")
        seat = Seat(self)
        seat.take(1)
        self._seats.add(seat)
        try:
            yield seat
        finally:
            self._seats.remove(seat)
            self.num_live -= seat.num_held
            if not self.num_live:
                self._idle.set()

    def _take(self, num_more: int, *, others: int) -> None:
        if others and self.num_live + num_more > self.limit:
            raise APIError(
                429, f"{others} sequences are waiting or running; try again later", code="queue_full"
            )
        self.num_live += num_more
        self._idle.clear()

    def start_draining(self) -> None:
        """Accept no more requests; running ones continue."""
        self.is_draining = True

    def stop_all(self) -> None:
        """End every live request: the time to drain is over."""
        error = APIError(503, "the server is shutting down", code="shutting_down")
        for seat in self._seats:
            if seat.stop is not None:
                seat.stop(error)

    async def wait_idle(self) -> None:
        """Return when no request is live."""
        await self._idle.wait()


class Seat:
    """The seats that one request holds."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.num_held = 0
        self.stop: Callable[[Exception], None] | None = None  # ends the request, once it runs

    def take(self, num_sequences: int) -> None:
        """Hold this many in total. A request with more sequences than seats is admitted only when alone."""
        others = self._admission.num_live - self.num_held
        self._admission._take(num_sequences - self.num_held, others=others)
        self.num_held = num_sequences
