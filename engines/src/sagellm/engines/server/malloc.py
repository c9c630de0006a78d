"""Keeps what one large body took from staying with the process."""

from __future__ import annotations

import ctypes
from contextlib import suppress

_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = 1 << 20


def give_large_blocks_back() -> None:
    """Have malloc take blocks of 1 MiB and more from the system and give them back when they are freed.

    Left to itself, glibc keeps up to 64 MiB of them for each of its arenas. For a process that only serves:
    one that computes would wait for the system at every large temporary. Does nothing without glibc.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
