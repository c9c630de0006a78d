"""Configures malloc so that memory of large request bodies returns to the system."""

from __future__ import annotations

import ctypes
from contextlib import suppress

_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = 1 << 20


def return_large_blocks() -> None:
    """Have malloc map blocks of 1 MiB and more, so that they return to the system when freed.

    By default glibc keeps up to 64 MiB of them per arena. Not for a process that computes, where each large
    temporary would cost system calls. Does nothing without glibc.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
