"""Runs a tier on its own thread, so that callers never wait for a device or a server."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from threading import Condition, Thread, current_thread
from typing import NamedTuple, TypeAlias
from weakref import finalize

from sagellm.core.chaos import flaky
from sagellm.core.kv_block import BlockHeader, BlockKey
from sagellm.core.logging import get_logger
from sagellm.core.protocols.kv_tier import (
    KVTierMetrics,
    KVTierProtocol,
    Ticket,
    TierOutcome,
    TierRequest,
    TierResult,
    check_requests,
    run_to_end,
)
from sagellm.core.runtime import Clock, SystemClock

_BATCH_BYTES = 4 << 20
"""KV handed to the tier in one operation, which has one deadline; at least one job."""

_CLOSE_S = 1.0

_log = get_logger(__name__)

SEARCH_PAUSE_S = 0.004
"""Pause between two slices of a search, which leaves the interpreter to other threads."""

Search: TypeAlias = Callable[[], float | None]
"""Looks for stored blocks for about 1 ms; returns the seconds until the next slice, None when finished."""


class _Job(NamedTuple):
    ticket: Ticket
    requests: Sequence[TierRequest]

    @property
    def is_urgent(self) -> bool:
        """Whether a caller waits for data."""
        return any(request.action == "get" for request in self.requests)

    @property
    def num_bytes(self) -> int:
        return sum(request.data.nbytes for request in self.requests if request.data is not None)


class BackgroundTier(KVTierProtocol):
    """Runs a tier whose `submit` blocks on a thread.

    Submits with a get come first; otherwise the order is kept. If an operation takes longer than `timeout_s`,
    it, all queued requests and, until it returns, all new ones fail. The tier works on this object's own
    buffers, so an operation that ends late never touches a caller's.

    While the queue is empty the thread calls `search`: at first, after operations, and when it asked for.
    """

    def __init__(
        self,
        tier: KVTierProtocol,
        *,
        timeout_s: float,
        search: Search | None = None,
        clock: Clock | None = None,
        label: str = "KV tier",
    ) -> None:
        self.tier = tier
        clock = SystemClock() if clock is None else clock
        self._work = _Work(label, clock, round(timeout_s * 1e9), tier.metrics())
        self._work.search_in_s = None if search is None else 0.0
        self._thread = Thread(target=_run, args=(self._work, tier, search), name="kv-tier", daemon=True)
        self._thread.start()
        # The thread refers to the work, not to this object, so that collecting this object ends it.
        self._close = finalize(self, _stop, self._work, self._thread)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.tier!r}>"

    def wait_for_search(self, timeout_s: float) -> bool:
        """Wait at most so long until the search has ended or failed; say whether it has."""
        with self._work.changed:
            return self._work.changed.wait_for(lambda: not self._work.is_searching, timeout_s)

    def submit(self, requests: Sequence[TierRequest]) -> Ticket:
        """Queue requests. Raises InvalidInputError for a put or get without data."""
        check_requests(requests)
        with self._work.changed:
            return self._work.add(requests)

    def poll(self) -> list[TierResult]:
        """Return what has finished or timed out."""
        with self._work.changed:
            self._work.give_up_late()
            results, self._work.results = self._work.results, []
        return results

    def contains(self, key: BlockKey) -> bool:
        """Look into the tier's index; False while the tier does not answer."""
        return not self._work.is_stuck and self.tier.contains(key)

    def stored(self) -> Sequence[tuple[BlockHeader, int]]:
        """List the tier's index."""
        return self.tier.stored()

    def get_cost_ns(self, keys: Sequence[BlockKey]) -> int:
        """Ask the tier."""
        return self.tier.get_cost_ns(keys)

    def metrics(self) -> KVTierMetrics:
        """Return the tier's counts after its last operation."""
        with self._work.changed:
            counted = self._work.metrics
            return replace(counted, num_failed=counted.num_failed + self._work.num_given_up)

    def check_integrity(self) -> None:
        """Check the tier's bookkeeping."""
        self.tier.check_integrity()

    def close(self) -> None:
        """Finish queued puts and close the tier; waits at most one second."""
        self._close()


@dataclass(slots=True, eq=False)
class _Work:
    """The queue and results that callers and the thread share; `changed` guards them all."""

    label: str  # for the log
    clock: Clock
    timeout_ns: int
    metrics: KVTierMetrics
    changed: Condition = field(default_factory=Condition)
    urgent: deque[_Job] = field(default_factory=deque)
    others: deque[_Job] = field(default_factory=deque)
    current: list[_Job] = field(default_factory=list)
    results: list[TierResult] = field(default_factory=list)
    started_ns: int | None = None  # when the running operation began
    is_stuck: bool = False  # the running operation has timed out
    search_in_s: float | None = None
    is_closed: bool = False
    num_submits: int = 0
    num_given_up: int = 0
    spare: list[memoryview] = field(default_factory=list)

    @property
    def is_searching(self) -> bool:
        """Whether the next slice of the search is due."""
        return self.search_in_s is not None and self.search_in_s <= SEARCH_PAUSE_S

    def is_due(self) -> bool:
        """Say whether the thread has something to do now."""
        return bool(self.is_closed or self.urgent or self.others)

    def add(self, requests: Sequence[TierRequest]) -> Ticket:
        """Queue requests, or fail them if the tier is stuck or closed."""
        job = _Job(Ticket(self.num_submits), requests)
        self.num_submits += 1
        if self.is_stuck or self.is_closed or not requests:
            self._fail([job])
        else:
            (self.urgent if job.is_urgent else self.others).append(job)
            self.changed.notify_all()
        return job.ticket

    def take(self) -> list[tuple[TierRequest, memoryview | None]]:
        """Begin the next jobs; return their requests on our own buffers, each with the caller's buffer."""
        num_bytes = 0
        while waiting := self.urgent or self.others:
            num_bytes += waiting[0].num_bytes
            if self.current and num_bytes > _BATCH_BYTES:
                break
            self.current.append(waiting.popleft())
        return [self._with_own_buffer(request) for job in self.current for request in job.requests]

    def end(
        self,
        taken: list[tuple[TierRequest, memoryview | None]],
        outcomes: Sequence[TierOutcome],
        metrics: KVTierMetrics,
    ) -> None:
        """Copy data and outcomes to the callers, unless the operation has timed out."""
        self.metrics = metrics
        left = iter(zip(taken, outcomes, strict=True))
        for job in self.current:
            mine = [next(left) for _ in job.requests]
            for (request, theirs), outcome in mine:
                if request.action == "get" and outcome == "done" and theirs is not None:
                    assert request.data is not None, "it has a buffer where the caller's request has one"
                    theirs[:] = request.data
            self.results.append(TierResult(job.ticket, tuple(outcome for _, outcome in mine)))
        self.current = []
        self._returned()
        self.spare = [request.data for request, _ in taken if request.data is not None]

    def end_search(self, metrics: KVTierMetrics, search_in_s: float | None) -> None:
        """Record a slice of the search and wake the threads that wait for its end."""
        self.metrics, self.search_in_s = metrics, search_in_s
        self._returned()
        self.changed.notify_all()

    def give_up_late(self) -> None:
        """Fail the running operation and all queued jobs if it has timed out."""
        if self.started_ns is None or self.is_stuck:
            return
        if self.clock.now_ns() - self.started_ns > self.timeout_ns:
            self.is_stuck = True
            jobs = [*self.current, *self.urgent, *self.others]
            self.current = []
            self.urgent.clear()
            self.others.clear()
            self._fail(jobs)

    def _returned(self) -> None:
        self.started_ns, self.is_stuck = None, False

    def _fail(self, jobs: Sequence[_Job]) -> None:
        before = self.num_given_up
        for job in jobs:
            self.num_given_up += len(job.requests)
            self.results.append(TierResult(job.ticket, _failed(len(job.requests))))
        if self.num_given_up.bit_length() > before.bit_length():  # at each power of two, however many at once
            _log.warning(
                "the %s has not answered within %g s (timeout_s); %d requests failed so far, and what it has "
                "is computed",
                self.label,
                self.timeout_ns / 1e9,
                self.num_given_up,
            )

    def _with_own_buffer(self, request: TierRequest) -> tuple[TierRequest, memoryview | None]:
        if request.data is None:
            return request, None
        theirs = request.data.cast("B")
        fits = bool(self.spare) and len(self.spare[-1]) == len(theirs)
        mine = self.spare.pop() if fits else memoryview(bytearray(len(theirs)))
        if request.action == "put":
            mine[:] = theirs
        return TierRequest(request.action, request.header, mine), theirs


def _run(work: _Work, tier: KVTierProtocol, search: Search | None) -> None:
    """Run the queue until closed, and the search while it is empty."""
    while True:
        with work.changed:
            work.changed.wait_for(work.is_due, work.search_in_s)
            if work.is_closed and not work.others:
                break
            taken = work.take()
            work.started_ns = work.clock.now_ns()
        if taken:
            _do(work, tier, taken, search_in_s=None if search is None else 0.0)
        elif search is not None:
            _search(work, tier, search)
    tier.close()


@flaky("tier.work")
def _do(
    work: _Work,
    tier: KVTierProtocol,
    taken: list[tuple[TierRequest, memoryview | None]],
    *,
    search_in_s: float | None,
) -> None:
    try:
        outcomes = run_to_end(tier, [request for request, _ in taken])
    except BaseException:  # this thread gets no Ctrl-C
        _log.exception("a KV tier raised an error; its requests have failed")
        outcomes = _failed(len(taken))
    metrics = tier.metrics()
    with work.changed:
        work.end(taken, outcomes, metrics)
        work.search_in_s = search_in_s


def _failed(num_requests: int) -> tuple[TierOutcome, ...]:
    outcome: TierOutcome = "failed"
    return (outcome,) * num_requests


def _search(work: _Work, tier: KVTierProtocol, search: Search) -> None:
    try:
        search_in_s = search()
    except BaseException:
        _log.exception("a KV tier raised an error while it searched for blocks")
        search_in_s = None
    metrics = tier.metrics()
    with work.changed:
        work.end_search(metrics, search_in_s)


def _stop(work: _Work, thread: Thread) -> None:
    """End the thread after the queued puts; a stuck one closes its tier when its operation returns."""
    with work.changed:
        work.is_closed = True
        work.urgent.clear()  # no caller will read the data
        work.results.clear()
        work.changed.notify_all()
    if thread is not current_thread():  # the collector may run this on the thread itself
        thread.join(_CLOSE_S)
        with work.changed:
            work.others.clear()
