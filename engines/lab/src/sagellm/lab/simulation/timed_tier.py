"""Tiers of a simulation: like CostedKVTier, but what is fetched arrives after its time on a virtual clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from sagellm.core import Clock, Ticket, TierRequest, TierResult
from sagellm.lab.simulation.costed_tier import CostedKVTier


class TimedKVTier(CostedKVTier):
    """One link, on which fetches follow one another; storing takes no time and does not use it."""

    def __init__(self, max_blocks: int, *, get_ns: int, clock: Clock) -> None:
        super().__init__(max_blocks, get_ns=get_ns)
        self._clock = clock
        self._free_ns = 0  # when the link has nothing to do
        self._due: deque[tuple[int, TierResult]] = deque()

    def submit(self, requests: Sequence[TierRequest]) -> Ticket:
        """Decide at once what is found, and when it arrives."""
        ticket = super().submit(requests)
        (result,) = super().poll()
        fetched = [
            request.header.key
            for request, outcome in zip(requests, result.outcomes, strict=True)
            if request.action == "get" and outcome == "done"
        ]
        now_ns = self._clock.now_ns()
        due_ns = now_ns
        if fetched:
            due_ns = self._free_ns = max(now_ns, self._free_ns) + self.get_cost_ns(fetched)
        self._due.append((due_ns, result))
        return ticket

    def poll(self) -> list[TierResult]:
        """Return the results that have arrived."""
        now_ns = self._clock.now_ns()
        arrived = [result for due_ns, result in self._due if due_ns <= now_ns]
        self._due = deque(each for each in self._due if each[0] > now_ns)
        return arrived
