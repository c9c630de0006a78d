"""When a core last came further: one number, in memory that its process and the front share."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from typing import Self

RESPONSIVE_S = 4.0
"""An engine without a beat for this long is not healthy."""

_BYTES = 8


class Pulse:
    """A clock that a core sets at each layer of a forward pass, and that stops when the core hangs.

    A beat is one aligned store of monotonic nanoseconds, so it needs no lock, and reading it needs no answer
    of the core. A thread or a timer that beat on its own would go on while a step hangs.
    """

    def __init__(self, descriptor: int) -> None:
        self._time_ns = memoryview(mmap.mmap(descriptor, _BYTES)).cast("q")

    @classmethod
    def create(cls) -> tuple[Self, int]:
        """Make a pulse that beats now; return the descriptor that another process opens it by, too.

        The caller closes the descriptor. The memory has no name, so nothing else can reach or shorten it.
        """
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("sagellm-pulse")
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.truncate(descriptor, _BYTES)
        pulse = cls(descriptor)
        pulse.beat()
        return pulse, descriptor

    def beat(self) -> None:
        """Say that the core has come further."""
        self._time_ns[0] = time.monotonic_ns()

    @property
    def last_ns(self) -> int:
        """The time of the last beat, of the monotonic clock that all processes of a machine share."""
        return self._time_ns[0]

    @property
    def age_s(self) -> float:
        """Seconds since the last beat."""
        return (time.monotonic_ns() - self.last_ns) / 1e9
