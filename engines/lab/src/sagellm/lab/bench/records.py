"""The record of one request, and how a request fails."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sagellm.engines.metrics.latency import RequestTimes

if TYPE_CHECKING:
    from sagellm.lab.bench.workloads import Session, Turn


def now_ns() -> int:
    """Return the time of the running event loop, which may be virtual."""
    return round(asyncio.get_running_loop().time() * 1e9)


class RequestFailedError(Exception):
    """One request failed; the load continues. Failures are counted by `kind`.

    `connect` no connection · `cut` the connection ended in the middle · `timeout` · `http_<status>` ·
    `bad_response` not HTTP, not a stream or not JSON · `stream_error` the server reported one in the stream,
    or ended it with the finish reason error or abort · `empty` no tokens.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One request, in nanoseconds of `now_ns`.

    `event_times_ns` are the arrival times of bytes with something visible: text, reasoning, a tool call or
    token ids. A server may put several tokens into one event.
    """

    arrival_ns: int
    num_asked_tokens: int
    num_prompt_tokens: int
    end_ns: int = 0
    event_times_ns: array[int] = field(default_factory=lambda: array("q"))
    finish_reason: str | None = None
    finish_ns: int | None = None
    num_reported_tokens: int | None = None  # output tokens by the server's own count
    num_cached_tokens: int | None = None
    num_draft_tokens: int = 0  # verified, as far as the server says
    num_accepted_tokens: int = 0  # of those
    error_kind: str | None = None
    error: str | None = None
    turn: tuple[Session, Turn] | None = None  # of a load of sessions

    @property
    def is_ok(self) -> bool:
        """Whether the whole answer arrived."""
        return self.error_kind is None

    @property
    def num_output_tokens(self) -> int:
        """Tokens by the server's count, else events."""
        return len(self.event_times_ns) if self.num_reported_tokens is None else self.num_reported_tokens

    @property
    def times(self) -> RequestTimes:
        """Return the input of the metric formulas; only for a request that succeeded.

        Text that the server held back to the end became visible with the end.
        """
        seen = self.event_times_ns or array("q", [self.finish_ns or self.end_ns])
        return RequestTimes(
            arrival_ns=self.arrival_ns,
            first_token_ns=seen[0],
            last_token_ns=seen[-1],
            num_output_tokens=self.num_output_tokens,
        )

    def fail(self, error: RequestFailedError) -> None:
        """Record a failure."""
        self.error_kind, self.error = error.kind, str(error)
