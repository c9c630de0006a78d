"""Large pieces of memory from the kernel."""

from __future__ import annotations

import mmap
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_PAGE_BYTES = 4096
_MOST_KEPT_BYTES = 256 << 20
_PIECE_BYTES = 2 << 20  # a huge page
_TOUCHED_AT_ONCE = 32 << 20  # few enough to stop soon, so many that the interpreter's lock is rarely needed


def zeroed_pages(num_bytes: int) -> Bytes:
    """Return zeros in an anonymous mapping, with huge pages if the kernel has them.

    Reserved at once, and allocated page by page as it is first written. It lives as long as a view of it.
    Raises OSError or MemoryError if it is refused.
    """
    if not num_bytes:
        return np.empty(0, np.uint8)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


class ReusedMemory:
    """Memory that is used again once nobody holds what was taken of it: pages that stay need no clearing.

    97 MB, the logits of 160 tokens, take the kernel 4 ms to free and longer to clear.
    """

    def __init__(self) -> None:
        self._memory = zeroed_pages(0)

    def take(self, num_bytes: int) -> Bytes:
        """Return so many bytes of any content, valid as long as a view of them lives."""
        if num_bytes > _MOST_KEPT_BYTES:
            return np.empty(num_bytes, np.uint8)
        is_held = sys.getrefcount(self._memory) > 2  # this object's reference, and that of the call
        if is_held or self._memory.nbytes < num_bytes:
            self._memory = zeroed_pages(num_bytes)
        return self._memory[:num_bytes]


class WeightMemory:
    """Memory of `zeroed_pages` that a thread allocates while modules are imported, for a model's weights.

    The kernel clears a page when it is first touched, and a virtual machine's host may have to find it
    first: up to 3 s per GiB, as long as all imports take. The thread does not hold the interpreter's lock
    meanwhile.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_touched_bytes = num_bytes
        self._memory = zeroed_pages(num_bytes + num_bytes // 8)  # packed matrices are padded
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._touch, name="sagellm-weight-memory")
        self._thread.start()

    def take(self, num_bytes: int) -> Bytes | None:
        """Return so many bytes, once, all zero; None if there are fewer. What is left over is freed."""
        self.stop()
        memory, self._memory = self._memory, zeroed_pages(0)
        if memory.nbytes < num_bytes:
            return None
        surplus = -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES
        if surplus < memory.nbytes and isinstance(memory.base, memoryview):
            mapping = memory.base.obj
            assert isinstance(mapping, mmap.mmap), "zeroed_pages makes it of one"
            mapping.madvise(mmap.MADV_DONTNEED, surplus)
        return memory[:num_bytes]

    def stop(self) -> None:
        """End the thread. What it has not touched is allocated when it is written."""
        self._is_stopped.set()
        self._thread.join()

    def _touch(self) -> None:
        for begin in range(0, self._num_touched_bytes, _TOUCHED_AT_ONCE):
            if self._is_stopped.is_set():
                return
            end = min(begin + _TOUCHED_AT_ONCE, self._num_touched_bytes)
            # numpy lets go of the interpreter's lock; nobody else has the memory until `take` has ended this
            self._memory[begin:end:_PAGE_BYTES] = 0


_weight_memory: ContextVar[WeightMemory | None] = ContextVar("weight_memory", default=None)


@contextmanager
def weight_memory(num_bytes: int) -> Iterator[None]:
    """Allocate memory on a thread for the weights of the model that the block loads.

    `num_bytes` is an estimate: with less than the model takes, none of it is used. Where the kernel refuses,
    the block runs without.
    """
    try:
        ahead = WeightMemory(num_bytes)
    except (OSError, MemoryError):
        yield
        return
    token = _weight_memory.set(ahead)
    try:
        yield
    finally:
        _weight_memory.reset(token)
        ahead.stop()


def pages_for_weights(num_bytes: int) -> Bytes:
    """Return zeros as `zeroed_pages` does, out of `weight_memory` if this is inside its block."""
    ahead = _weight_memory.get()
    taken = None if ahead is None else ahead.take(num_bytes)
    return zeroed_pages(num_bytes) if taken is None else taken


class AllocatedAhead:
    """Memory of `zeroed_pages` that idle time allocates ahead of its use.

    The kernel clears a page, and a virtual machine's host may have to find it first, when it is first
    written: of a new prompt's time that can be more than its attention takes. What is allocated ahead is as
    much as a recent burst of use took anew, at most `max_ahead_bytes`, and a quarter of that before the first
    burst. A burst ends when idle time begins; each one takes an eighth off the demand of those before it.
    """

    # [0, used)          written, or skipped by what is written
    # [used, allocated)  ahead

    def __init__(self, memory: Bytes, max_ahead_bytes: int) -> None:
        self._memory, self._max_ahead_bytes = memory.reshape(-1), max_ahead_bytes
        self._used_bytes = self._allocated_bytes = 0
        self._burst_start_bytes = 0
        self._demand_bytes = max_ahead_bytes // 4
        self._is_in_burst = False

    @property
    def allocated_bytes(self) -> int:
        """Bytes from the start on that have been allocated ahead."""
        return self._allocated_bytes

    def use(self, num_bytes: int) -> None:
        """Say that the first `num_bytes` are in use."""
        self._is_in_burst = True
        self._used_bytes = max(self._used_bytes, num_bytes)

    def allocate_some(self) -> bool:
        """Allocate one piece, and say whether there is more to allocate. What the memory holds stays."""
        if self._is_in_burst:
            self._end_burst()
        start = max(self._allocated_bytes, self._used_bytes // _PIECE_BYTES * _PIECE_BYTES)
        ahead_bytes = min(self._demand_bytes, self._max_ahead_bytes)
        wanted = min(self._memory.nbytes, self._used_bytes + ahead_bytes)
        if start >= wanted:
            return False
        end = min(start + _PIECE_BYTES, self._memory.nbytes)
        self._memory[start:end:_PAGE_BYTES] |= 0
        self._allocated_bytes = end
        return end < wanted

    def _end_burst(self) -> None:
        taken_bytes = self._used_bytes - self._burst_start_bytes
        self._demand_bytes = max(taken_bytes, self._demand_bytes * 7 // 8)
        self._burst_start_bytes = self._used_bytes
        self._is_in_burst = False
