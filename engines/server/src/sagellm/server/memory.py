"""Freed memory goes back to the system: glibc keeps what lies between live blocks."""

from __future__ import annotations

import ctypes
import threading
import time
from contextlib import suppress

_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = 1 << 20
_RETURN_S = 20.0


def keep_returning_memory() -> None:
    """Give freed memory back every 20 s, on a thread, because it takes milliseconds.

    Requests of many shapes leave gaps, which no later one fills, at some MiB an hour for the front and one a
    minute for the core. Does nothing without glibc.
    """
    with suppress(OSError, AttributeError):
        trim = ctypes.CDLL(None).malloc_trim

        def run() -> None:
            while True:
                time.sleep(_RETURN_S)
                trim(0)

        threading.Thread(target=run, name="return-memory", daemon=True).start()


def return_large_blocks() -> None:
    """Have malloc map blocks of 1 MiB and more, so that they return to the system when freed.

    By default glibc keeps up to 64 MiB of them per arena. Not for a process that computes, where each large
    temporary would cost system calls. Does nothing without glibc.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
