"""Decides which of two eviction orders a cache follows, by what each of them would have saved."""

from __future__ import annotations

import math
from collections.abc import Callable

from sagellm.kvmgr.eviction.return_ranking import Index
from sagellm.kvmgr.eviction.shadows import Saved, Shadows, Stretch, Turn

_MEMORY = 8.0
"""After this many refills of the cache, a saving counts 1 ÷ e of what it did."""

_ERRORS_AHEAD = 1.5
"""The learnt order is followed once it leads by this many standard errors."""


class Duel:
    """Compares two shadows of a cache: one evicts by last use, the other by what room earns.

    `is_won` says that the latter saves more. Its lead is the sum, over prompts, of the difference in blocks
    saved, older ones discounted; it wins when the lead is 1.5 times its standard error (the root of the
    sum of squares), and loses when it no longer leads. So chance seldom decides, while a change of the load
    does within a few refills of the cache.
    """

    def __init__(self, model: Index, gives_up_ends: Callable[[], bool]) -> None:
        self.is_won = False
        self._shadows = Shadows(model, gives_up_ends)
        self._lead = self._variance = 0.0  # blocks, blocks²
        self._num_saved = [0, 0]  # blocks, of the two shadows
        self._num_switches = 0

    def path(self, turn: Turn | None, num_blocks: int) -> list[Stretch]:
        """Return the stretches of the first blocks of a turn, the deepest first; `use` must follow."""
        return self._shadows.path(turn, num_blocks)

    def hit(self, path: list[Stretch], depth: int, room: float, now_s: float) -> None:
        """Record that the cache had the first blocks of a prompt, a path, up to a depth in blocks."""
        self._count(self._shadows.use(path, None, depth, room, now_s), 0, depth, room)

    def use(self, path: list[Stretch], turn: Turn, begin: int, depth: int, room: float, now_s: float) -> None:
        """Let a turn use a path and what follows it, up to a depth; the cache had nothing from `begin` on.

        Blocks before that were counted by `hit`.
        """
        self._count(self._shadows.use(path, turn, depth, room, now_s), begin, depth, room)

    def _count(self, saved: Saved, begin: int, depth: int, room: float) -> None:
        lru, reuse = max(0, saved.lru - begin), max(0, saved.reuse - begin)
        self._num_saved[0] += lru
        self._num_saved[1] += reuse
        if room == math.inf:
            return
        difference = reuse - lru
        kept = math.exp(-max(0, depth - begin - min(lru, reuse)) / (_MEMORY * max(room, 1.0)))
        self._lead = self._lead * kept + difference
        self._variance = self._variance * kept + difference * difference
        least = 0.0 if self.is_won else _ERRORS_AHEAD * math.sqrt(self._variance)
        is_won = self._lead > least
        self._num_switches += is_won != self.is_won
        self.is_won = is_won

    def details(self) -> dict[str, float]:
        """Return how much the shadows saved, and which of them is followed."""
        return {
            "is_learnt_order_used": float(self.is_won),
            "num_switches": float(self._num_switches),
            "shadow_blocks_saved_lru": float(self._num_saved[0]),
            "shadow_blocks_saved_reuse": float(self._num_saved[1]),
        }
