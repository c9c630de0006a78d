"""What an operator may ask of the KV pool of a running engine."""

from __future__ import annotations

from typing import Any

from sagellm.core import Clock
from sagellm.engines.core.compaction import Compactor


class PoolAdmin:
    """Operations between two steps."""

    def __init__(self, compactor: Compactor, clock: Clock) -> None:
        self._compactor = compactor
        self._clock = clock

    def compact(self) -> dict[str, Any]:
        """Move some live blocks; ask again until it has moved none. Says how many, and how long it took."""
        started_ns = self._clock.now_ns()
        num_moved = self._compactor.advance()
        return {"num_moved_blocks": num_moved, "moving_s": (self._clock.now_ns() - started_ns) / 1e9}
