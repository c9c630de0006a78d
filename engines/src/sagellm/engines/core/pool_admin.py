"""What an operator may ask of the KV pool of a running engine."""

from __future__ import annotations

from typing import Any

from sagellm.engines.core.compaction import Compactor


class PoolAdmin:
    """Operations between two steps."""

    def __init__(self, compactor: Compactor) -> None:
        self._compactor = compactor

    def compact(self) -> dict[str, Any]:
        """Move some live blocks and report how many and how long it took; repeat until none moved."""
        num_moved = self._compactor.advance()
        return {"num_moved_blocks": num_moved, "moving_s": self._compactor.slice_ns / 1e9}
