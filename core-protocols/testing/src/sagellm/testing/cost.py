"""What calls cost: CPU time of this thread, which others on the machine hardly change."""

from __future__ import annotations

import time
from collections.abc import Callable

from sagellm.core.runtime import SystemClock

_USUAL_NS = 750_000
"""What the piece of work below takes on a server of 2023."""


class CPUClock(SystemClock):
    """Tells the CPU time of the thread that asks."""

    now_ns = staticmethod(time.thread_time_ns)


def cpu_ns(call: Callable[[], object]) -> int:
    """Return the CPU time of a call."""
    start_ns = time.thread_time_ns()
    call()
    return time.thread_time_ns() - start_ns


def least_cpu_ns(call: Callable[[], object], num_calls: int) -> int:
    """Return the least CPU time of several calls."""
    return min(cpu_ns(call) for _ in range(num_calls))


def slowness() -> float:
    """Return how many times as long as usual this machine takes for a piece of Python, at least 1.

    A budget is multiplied by this, so that it means the same on a slow machine.
    """
    return max(1.0, least_cpu_ns(_work, 5) / _USUAL_NS)


def _work() -> None:
    """Fill and empty a dict of small objects, as bookkeeping does."""
    held: dict[int, list[int]] = {}
    for number in range(5_000):
        held[number] = [number]
    for number in range(0, 10_000, 2):
        held.pop(number, None)
