"""Who gives up its blocks when a running request lacks some."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sagellm.core.protocols.scheduler_ir import ScheduledRequest, ScheduleRequest


def preemption_order(running: Sequence[ScheduleRequest]) -> list[ScheduleRequest]:
    """Sort running requests so that the one to preempt first comes last.

    It has the lowest priority, among equals the latest arrival, and on a tie stands last in
    `running`.
    """
    return sorted(running, key=_rank)


class Freed(NamedTuple):
    """What preemption gave back to the step."""

    num_blocks: int
    num_tokens: int


class Preemption:
    """The requests that one step preempts, taken from the end of an order.

    A request that needs room is in the order itself. So it takes blocks only from those behind
    it, and when none of them is left it goes too: the first in the order always advances, which
    is why every request ends.
    """

    __slots__ = ("_order", "gone", "preempted")

    def __init__(self, order: list[ScheduleRequest]) -> None:
        self._order = order
        self.gone: set[int] = set()  # id() of each preempted request
        self.preempted: list[ScheduleRequest] = []

    def make_room(self, request: ScheduleRequest, num_missing: int, entries: list[ScheduledRequest]) -> Freed:
        """Preempt until `num_missing` blocks are free or `request` itself has gone.

        A victim that `entries` schedules already is taken out again, with its tokens and new
        blocks. O(running) for each victim.
        """
        num_blocks = num_tokens = 0
        while num_blocks < num_missing:
            victim = self._order.pop()
            self.gone.add(id(victim))
            self.preempted.append(victim)
            num_blocks += victim.num_blocks
            for index, entry in enumerate(entries):
                if entry.request is victim:
                    num_blocks += entry.num_new_blocks
                    num_tokens += entry.num_tokens
                    del entries[index]
                    break
            if victim is request:
                break
        return Freed(num_blocks, num_tokens)


def _rank(request: ScheduleRequest) -> tuple[int, float]:
    return -request.priority, request.arrived_time
