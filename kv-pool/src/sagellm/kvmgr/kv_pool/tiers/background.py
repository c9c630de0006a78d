"""A tier on a thread of its own, so that nobody who calls it waits for a device or a server."""

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
"""KV that the tier is handed at once, one request at least: what a deadline is for."""

_CLOSE_S = 1.0

_log = get_logger(__name__)

SEARCH_PAUSE_S = 0.004
"""Between two slices of a search, in which other threads have the interpreter."""

Search: TypeAlias = Callable[[], float | None]
"""Does what nobody asked for, about a millisecond of it; says in how many seconds it wants to go on."""


class _Job(NamedTuple):
    ticket: Ticket
    requests: Sequence[TierRequest]

    @property
    def is_urgent(self) -> bool:
        """Whether somebody waits for data."""
        return any(request.action == "get" for request in self.requests)

    @property
    def num_bytes(self) -> int:
        return sum(request.data.nbytes for request in self.requests if request.data is not None)


class BackgroundTier(KVTierProtocol):
    """Hands what is submitted to a tier that answers at once, on a thread.

    Gets go before what else waits; otherwise the order stays. No operation of the tier lasts longer than
    `timeout_s` for those who wait: after that it, all behind it and, until it returns, all that is submitted
    have failed. The tier is given buffers of this one, so that an operation that ends late touches nobody's.

    `search` is called at the beginning and after operations, when nothing else is to be done, and as often
    as it says itself.
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
        # The thread knows the work and not this object, so that it ends with it.
        self._close = finalize(self, _stop, self._work, self._thread)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.tier!r}>"

    def wait_for_search(self, timeout_s: float) -> bool:
        """Wait until the search has ended or failed, so long at most; say whether it has."""
        with self._work.changed:
            return self._work.changed.wait_for(lambda: not self._work.is_searching, timeout_s)

    def submit(self, requests: Sequence[TierRequest]) -> Ticket:
        """Queue them. Raises InvalidInputError for a put or get without data."""
        check_requests(requests)
        with self._work.changed:
            return self._work.add(requests)

    def poll(self) -> list[TierResult]:
        """Return what was done, or has taken too long."""
        with self._work.changed:
            self._work.give_up_late()
            results, self._work.results = self._work.results, []
        return results

    def contains(self, key: BlockKey) -> bool:
        """Ask the tier's index; nothing is there while it does not answer."""
        return not self._work.is_stuck and self.tier.contains(key)

    def stored(self) -> Sequence[tuple[BlockHeader, int]]:
        """Ask the tier's index."""
        return self.tier.stored()

    def get_cost_ns(self, keys: Sequence[BlockKey]) -> int:
        """Ask the tier."""
        return self.tier.get_cost_ns(keys)

    def metrics(self) -> KVTierMetrics:
        """Return the tier's counts as they were after its last operation."""
        with self._work.changed:
            counted = self._work.metrics
            return replace(counted, num_failed=counted.num_failed + self._work.num_given_up)

    def check_integrity(self) -> None:
        """Check the tier's bookkeeping."""
        self.tier.check_integrity()

    def close(self) -> None:
        """Have the thread store what it was given and close the tier; after a second, do not wait for it."""
        self._close()


@dataclass(slots=True, eq=False)
class _Work:
    """What a thread is to do and has done. `changed` guards all of it."""

    label: str  # for the log
    clock: Clock
    timeout_ns: int
    metrics: KVTierMetrics
    changed: Condition = field(default_factory=Condition)
    urgent: deque[_Job] = field(default_factory=deque)
    others: deque[_Job] = field(default_factory=deque)
    current: list[_Job] = field(default_factory=list)
    results: list[TierResult] = field(default_factory=list)
    started_ns: int | None = None  # the operation that is under way
    is_stuck: bool = False  # it was given up
    search_in_s: float | None = None
    is_closed: bool = False
    num_submits: int = 0
    num_given_up: int = 0
    spare: list[memoryview] = field(default_factory=list)

    @property
    def is_searching(self) -> bool:
        """Whether there is more to be found at once."""
        return self.search_in_s is not None and self.search_in_s <= SEARCH_PAUSE_S

    def is_due(self) -> bool:
        """Say whether there is something to do at once."""
        return bool(self.is_closed or self.urgent or self.others)

    def add(self, requests: Sequence[TierRequest]) -> Ticket:
        """Queue requests, or fail them at once."""
        job = _Job(Ticket(self.num_submits), requests)
        self.num_submits += 1
        if self.is_stuck or self.is_closed or not requests:
            self._fail([job])
        else:
            (self.urgent if job.is_urgent else self.others).append(job)
            self.changed.notify_all()
        return job.ticket

    def take(self) -> list[tuple[TierRequest, memoryview | None]]:
        """Begin the next jobs: return their requests with buffers of our own, and the caller's."""
        num_bytes = 0
        while waiting := self.urgent or self.others:
            num_bytes += waiting[0].num_bytes
            if self.current and num_bytes > _BATCH_BYTES:
                break
            self.current.append(waiting.popleft())
        return [self._own(request) for job in self.current for request in job.requests]

    def end(
        self,
        taken: list[tuple[TierRequest, memoryview | None]],
        outcomes: Sequence[TierOutcome],
        metrics: KVTierMetrics,
    ) -> None:
        """Give callers what their requests came to, unless they were given up."""
        self.metrics = metrics
        left = iter(zip(taken, outcomes, strict=True))
        for job in self.current:
            mine = [next(left) for _ in job.requests]
            for (request, theirs), outcome in mine:
                if request.action == "get" and outcome == "done" and theirs is not None:
                    assert request.data is not None, "it has a buffer where the caller's has"
                    theirs[:] = request.data
            self.results.append(TierResult(job.ticket, tuple(outcome for _, outcome in mine)))
        self.current = []
        self._returned()
        self.spare = [request.data for request, _ in taken if request.data is not None]

    def end_search(self, metrics: KVTierMetrics, search_in_s: float | None) -> None:
        """Note a slice of a search, and tell those who wait for its end."""
        self.metrics, self.search_in_s = metrics, search_in_s
        self._returned()
        self.changed.notify_all()

    def give_up_late(self) -> None:
        """Fail everything if the operation under way has taken too long."""
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

    def _own(self, request: TierRequest) -> tuple[TierRequest, memoryview | None]:
        if request.data is None:
            return request, None
        theirs = request.data.cast("B")
        fits = bool(self.spare) and len(self.spare[-1]) == len(theirs)
        mine = self.spare.pop() if fits else memoryview(bytearray(len(theirs)))
        if request.action == "put":
            mine[:] = theirs
        return TierRequest(request.action, request.header, mine), theirs


def _run(work: _Work, tier: KVTierProtocol, search: Search | None) -> None:
    """Do what is submitted until the end, and search in between."""
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
        _log.exception("a KV tier raised an error; what it was asked for has failed")
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
    """End the thread once what is to be stored is; one that is stuck closes its tier when it returns."""
    with work.changed:
        work.is_closed = True
        work.urgent.clear()  # nobody waits for data any more
        work.results.clear()
        work.changed.notify_all()
    if thread is not current_thread():  # where the collector may run
        thread.join(_CLOSE_S)
        with work.changed:
            work.others.clear()
