"""The time of a core's last progress, in memory that its process and the front share."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from typing import Self

_BYTES = 8


class Heartbeat:
    """A timestamp that a core renews at each layer of a forward pass, so that it ages when the core hangs.

    A beat is one aligned store of monotonic nanoseconds, so it needs no lock, and reading it needs no answer
    from the core. No thread or timer beats by itself: it would continue while a step hangs. `now_ns` is the
    monotonic clock that both processes share.
    """

    def __init__(self, descriptor: int, *, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._time_ns = memoryview(mmap.mmap(descriptor, _BYTES)).cast("q")
        self._now_ns = now_ns

    @classmethod
    def create(cls, *, now_ns: Callable[[], int] = time.monotonic_ns) -> tuple[Self, int]:
        """Return a heartbeat that has just beaten, and a descriptor with which another process opens it.

        The caller closes the descriptor. The memory has no name, so no other process can reach or shrink it.
        """
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("sagellm-heartbeat")
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.truncate(descriptor, _BYTES)
        heartbeat = cls(descriptor, now_ns=now_ns)
        heartbeat.beat()
        return heartbeat, descriptor

    def beat(self) -> None:
        """Record that the core is making progress."""
        self._time_ns[0] = self._now_ns()

    @property
    def last_ns(self) -> int:
        """The time of the last beat on the machine-wide monotonic clock."""
        return self._time_ns[0]

    @property
    def age_s(self) -> float:
        """Seconds since the last beat."""
        return (self._now_ns() - self.last_ns) / 1e9
