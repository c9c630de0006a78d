"""When the operations of a step ran, where torch launches them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from sagellm.core.protocols.forward import Operation, TimedOperation

EndOf = Callable[[Operation], None]
"""Called after the launch of an operation, which began where the one before it ended."""


def not_timed(operation: Operation) -> None:
    """Take no time of an operation."""


class OperationTimer:
    """Takes the times of one step after another: on a GPU by events, on a CPU as they come.

    `begin` waits until the device is idle, and `finish` until it has computed the step. An operation on a GPU
    is as long as its work, or its launch where that takes longer.
    """

    def __init__(self, device: torch.device, take: Callable[[Sequence[TimedOperation]], None]) -> None:
        self._device, self._take = device, take
        self._has_events = device.type == "cuda"
        self._names: list[Operation] = []
        self._ends: list[torch.cuda.Event | int] = []
        self._begun_ns = 0

    def begin(self) -> None:
        """Begin a step with its first operation."""
        self._names.clear()
        self._ends.clear()
        if self._has_events:
            torch.cuda.synchronize(self._device)
        self._begun_ns = time.perf_counter_ns()
        self._ends.append(self._now())

    def end_of(self, operation: Operation) -> None:
        """Note that an operation is launched."""
        self._ends.append(self._now())
        self._names.append(operation)

    def finish(self) -> None:
        """Give away the times of the step."""
        ends = list(map(self._as_ns, self._ends))
        self._take(
            [
                TimedOperation(name, start_ns, end_ns)
                for name, (start_ns, end_ns) in zip(self._names, pairwise(ends), strict=True)
            ]
        )

    def _now(self) -> torch.cuda.Event | int:
        if not self._has_events:
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _as_ns(self, end: torch.cuda.Event | int) -> int:
        if isinstance(end, int):
            return end
        end.synchronize()
        first = self._ends[0]
        assert not isinstance(first, int), "a step has ends of one kind"
        elapsed_ms: float = first.elapsed_time(end)
        return self._begun_ns + round(elapsed_ms * 1e6)
