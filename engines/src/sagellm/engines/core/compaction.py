"""Moves live blocks together while requests run, a few between two steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq

from sagellm.core import BlockId, Clock
from sagellm.engines.core.kv_cache_manager import KVCacheManager

_STEP_SHARE = 1 / 8
_MAX_SLICE_NS = 10_000_000
_FIRST_BLOCKS = 4
_PAUSE_NS = 1_000_000_000
"""After so long without a slice the machine may be as busy as it was not then."""


class Compactor:
    """Brings the free blocks of a pool together: what is live moves to the lowest ids.

    Each slice copies the KV of some blocks on the device and puts their new ids into pool, prefix cache,
    block tables and fetches. It takes about an eighth of the time since the one before, in which
    requests had a step, and 10 ms at most; where none runs, 10 ms. If anything raises, every block stays
    where it was.
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
        self._num_blocks = _FIRST_BLOCKS  # of the next slice, if it had the time of the last
        self._ended_ns = 0
        self.slice_ns = 0  # what the last one took

    def advance(self) -> int:
        """Move some blocks between two steps; return how many, 0 when no move brings anything."""
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
        """Return how many blocks the time of a slice is enough for, from what the last one took."""
        if not self.slice_ns or pause_ns > _PAUSE_NS:
            return _FIRST_BLOCKS
        budget_ns = min(pause_ns * _STEP_SHARE, _MAX_SLICE_NS) if self._is_busy() else _MAX_SLICE_NS
        fitting = int(self._num_blocks * budget_ns / self.slice_ns)
        return max(1, min(fitting, 2 * self._num_blocks))
