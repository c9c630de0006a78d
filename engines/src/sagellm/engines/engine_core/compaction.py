"""Moves live blocks together while requests run, a few between two steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq

from sagellm.core import BlockId, Clock
from sagellm.engines.engine_core.kv_cache_manager import KVCacheManager

_STEP_SHARE = 1 / 8
_MAX_SLICE_NS = 10_000_000
_FIRST_BLOCKS = 4
_PAUSE_NS = 1_000_000_000
"""After this long without a slice, the last slice's time says nothing about the machine's current load."""


class Compactor:
    """Makes the free blocks of a pool contiguous by moving live blocks to the lowest ids.

    Each slice copies the KV of some blocks on the device and updates their ids in pool, prefix cache, block
    tables and fetches. It takes about an eighth of the time since the previous slice, during which requests
    had a step, but at most 10 ms; when no request runs, 10 ms. If anything raises, every block stays where it
    was.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        copy: Callable[[Seq[tuple[BlockId, BlockId]]], None],
        clock: Clock,
        is_busy: Callable[[], bool],
    ) -> None:
        self._kv = kv
        self._copy = copy
        self._clock = clock
        self._is_busy = is_busy
        self._num_blocks = _FIRST_BLOCKS  # of the next slice, given the time of the last
        self._ended_ns = 0
        self.slice_ns = 0  # what the last one took

    def advance(self) -> int:
        """Move some blocks between two steps; return how many, 0 when no move would help."""
        started_ns = self._clock.now_ns()
        moves = self._kv.plan_moves(self._size(started_ns - self._ended_ns))
        if moves:
            self._copy(moves)
            self._kv.move_blocks(moves)
        self._num_blocks = len(moves) or _FIRST_BLOCKS
        self._ended_ns = self._clock.now_ns()
        self.slice_ns = self._ended_ns - started_ns
        return len(moves)

    def _size(self, pause_ns: int) -> int:
        """Return how many blocks fit the time of a slice, judging by the last one."""
        if not self.slice_ns or pause_ns > _PAUSE_NS:
            return _FIRST_BLOCKS
        budget_ns = min(pause_ns * _STEP_SHARE, _MAX_SLICE_NS) if self._is_busy() else _MAX_SLICE_NS
        fitting = int(self._num_blocks * budget_ns / self.slice_ns)
        return max(1, min(fitting, 2 * self._num_blocks))
