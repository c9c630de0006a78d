"""What a cache of the same size would have saved under each of two policies, simulated without blocks."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from sagellm.core.logging import get_logger
from sagellm.kvmgr.eviction.return_model import ReturnModels
from sagellm.kvmgr.eviction.return_ranking import END, LEFT_BEHIND, LIVE, Place, ReturnRanking

_logger = get_logger(__name__)

LRU, REUSE = 0, 1
"""The two caches that are compared."""


@dataclass(slots=True, eq=False)
class Turn:
    """The newest request of a conversation, or the newest use of a shared beginning."""

    time_s: float
    number: int
    log_gaps: float
    depth: int  # tokens from the root to its end
    index: int  # in the model
    chance: float
    scale_s: float
    leaf_id: int
    num_hits: int  # of the leaf, when the turn ended there
    is_continued: bool = False
    is_cut: bool = False  # its end was given up
    is_shared: bool = False
    stretch: Stretch | None = field(default=None, repr=False)  # in which its prompt ends, while a node has it
    stretch_number: int = 0
    num_nodes: int = 0  # cached or remembered, whose turn it is

    def place(self, rank: int) -> Place:
        """Return the place in the ranking of leaves whose newest turn this is."""
        return Place.of(rank, self.chance, self.scale_s, self.time_s, is_shared=self.is_shared)

    def end_in(self, stretch: Stretch) -> None:
        """Let its prompt end in a stretch."""
        self.stretch, self.stretch_number = stretch, stretch.number

    def drop(self) -> None:
        """Count one node less. The last one lets go of its path, which refers back to it."""
        self.num_nodes -= 1
        if not self.num_nodes:
            self.stretch = None


@dataclass(slots=True, eq=False)
class Stretch:
    """Blocks of a prompt that were always used together, whether or not a cache still has them.

    `held` is the end of the part that each of the two caches has; equal to `start` if it has nothing.
    """

    number: int
    parent: Stretch | None
    start: int  # blocks from the root
    end: int
    turn: Turn
    held: list[int]
    num_below: int = 0  # child stretches with blocks in REUSE, and locks
    is_cut: bool = False  # its end was given up
    num_partings: int = 0  # times that a prompt diverged after it
    shared: Turn | None = None  # its newest use, once shared

    @property
    def num_blocks(self) -> int:
        """Its blocks in REUSE."""
        return self.held[REUSE] - self.start


class Saved(NamedTuple):
    """Blocks of one prompt that each of the two caches had."""

    lru: int
    reuse: int


class Shadows:
    """Two simulated caches of prompts: one evicts by last use, one by what room earns.

    A path of stretches represents a prompt, as in a radix tree. Both caches have as much room as the real
    one has blocks, and evict the end of a path before its beginning. A use costs O(stretches on the path),
    and each eviction O(log stretches): a few µs in total.
    """

    def __init__(self, model: ReturnModels, gives_up_ends: Callable[[], bool]) -> None:
        self.num_blocks = [0, 0]
        self._by_use: OrderedDict[Stretch, None] = OrderedDict()  # of LRU: all it holds, oldest first
        self._by_worth: ReturnRanking[Stretch] = ReturnRanking(model)  # of REUSE: no held ones below
        self._gives_up_ends = gives_up_ends
        self._numbers = count(1)

    def use(self, path: list[Stretch], turn: Turn | None, depth: int, room: float, now_s: float) -> Saved:
        """Let a turn use a path and what follows it, up to a depth in blocks.

        Without a turn, the path is only used again. Returns how many blocks each cache had.
        """
        saved = Saved(self._depth_held(path, LRU), self._depth_held(path, REUSE))
        known = path[0].end if path else 0
        if turn is not None and depth > known:
            above = path[0] if path else None
            path.insert(0, Stretch(next(self._numbers), above, known, depth, turn, [known, known]))
        if path:
            if turn is not None:
                turn.end_in(path[0])
            for step in path:
                turn = step.shared or turn
                step.turn = turn or step.turn
            self._use_in_lru(path, room)
            self._use_in_reuse(path, room, now_s)
        return saved

    def path(self, turn: Turn | None, num_blocks: int) -> list[Stretch]:
        """Return the stretches of a turn's first blocks, deepest first; split a partly used one.

        `use` must follow.
        """
        step = None if turn is None else turn.stretch
        while step is not None and step.start >= num_blocks:
            step = step.parent
        path: list[Stretch] = []
        while step is not None:
            if step.end > num_blocks:
                step = self._split(step, num_blocks)
            path.append(step)
            num_blocks, step = step.start, step.parent
        return path

    def _split(self, lower: Stretch, at: int) -> Stretch:
        """Give the first blocks of a stretch to a new one, which the caller uses."""
        upper = Stretch(
            next(self._numbers),
            lower.parent,
            lower.start,
            at,
            lower.turn,
            [min(at, end) for end in lower.held],
        )
        lower.parent, lower.start = upper, at
        if lower.held[LRU] <= at:
            self._by_use.pop(lower, None)
        if lower.held[REUSE] > at:
            upper.num_below = 1
            if lower.number in self._by_worth:
                self._rank(lower, lower.turn.time_s)
        else:
            self._by_worth.discard(lower.number)
        lower.held = [max(at, end) for end in lower.held]
        return upper

    def _depth_held(self, path: list[Stretch], cache: int) -> int:
        return next((step.held[cache] for step in path if step.held[cache] > step.start), 0)

    def _use_in_lru(self, path: list[Stretch], room: float) -> None:
        order = self._by_use
        num_missing = 0
        for step in path:
            order.pop(step, None)
            num_missing += step.end - step.held[LRU]
            step.held[LRU] = step.end
        num_over = self.num_blocks[LRU] + num_missing - room
        while num_over > 0 and order:
            oldest = next(iter(order))
            num_given = min(math.ceil(num_over), oldest.held[LRU] - oldest.start)
            oldest.held[LRU] -= num_given
            num_over -= num_given
            num_missing -= num_given
            if oldest.held[LRU] == oldest.start:
                del order[oldest]
        self.num_blocks[LRU] += num_missing
        for step in path:  # the end of a path goes before its beginning
            order[step] = None

    def _use_in_reuse(self, path: list[Stretch], room: float, now_s: float) -> None:
        num_missing = 0
        for step in path:
            self._by_worth.discard(step.number)
            step.num_below += 1  # a lock
            num_missing += step.end - step.held[REUSE]
        self._evict(self.num_blocks[REUSE] + num_missing - room, now_s)
        self.num_blocks[REUSE] += num_missing
        for step in path:
            if step.held[REUSE] == step.start and step.parent is not None:
                step.parent.num_below += 1
            step.held[REUSE] = step.end
            step.num_below -= 1
        for step in path:
            if not step.num_below:
                self._rank(step, now_s)

    def _evict(self, num_over: float, now_s: float) -> None:
        ranking = self._by_worth
        while num_over > 0 and (worst := ranking.first(now_s)) is not None:
            num_given = min(math.ceil(num_over), worst.num_blocks)
            if self._rank_of(worst) == END:
                num_given = 1
                worst.is_cut = True
                self._rank(worst, now_s)
            worst.held[REUSE] -= num_given
            self.num_blocks[REUSE] -= num_given
            num_over -= num_given
            if worst.held[REUSE] == worst.start:
                ranking.discard(worst.number)
                above = worst.parent
                if above is not None:
                    above.num_below -= 1
                    if not above.num_below and above.num_blocks:
                        self._rank(above, now_s)

    def _rank(self, stretch: Stretch, now_s: float) -> None:
        turn = stretch.turn
        place = turn.place(self._rank_of(stretch))
        self._by_worth.add(stretch.number, stretch, place, now_s)

    def _rank_of(self, stretch: Stretch) -> int:
        turn = stretch.turn
        if turn.is_continued:
            return LEFT_BEHIND
        is_end = turn.stretch_number == stretch.number and not (turn.is_shared or stretch.is_cut)
        is_end = is_end and stretch.num_blocks > 1
        return END if is_end and self._gives_up_ends() else LIVE


_MEMORY = 8.0
"""After this many refills of the cache, a saving has 1 ÷ e of its weight."""

_ERRORS_AHEAD = 0.5
"""The learnt order is followed once it leads by this many standard errors."""


class Duel:
    """Compares two shadows of a cache: one evicts by last use, the other by what room earns.

    `is_won` says that the latter saves more. Its lead is the sum, over prompts, of the difference in blocks
    saved, older ones discounted; it wins when the lead is half its standard error (the root of the
    sum of squares), and loses when it no longer leads. So chance seldom decides, while a change of the load
    does within a few refills of the cache.
    """

    def __init__(self, model: ReturnModels, gives_up_ends: Callable[[], bool]) -> None:
        self.is_won = False
        self._shadows = Shadows(model, gives_up_ends)
        self._lead = self._variance = 0.0  # blocks, blocks²
        self._num_saved = [0, 0]  # blocks, of the two shadows
        self._num_switches = 0

    def learn_from(self, other: Duel) -> None:
        """Begin with another duel's verdict and lead."""
        self.is_won, self._lead, self._variance = other.is_won, other._lead, other._variance

    def path(self, turn: Turn | None, num_blocks: int) -> list[Stretch]:
        """Return the stretches of the first blocks of a turn, deepest first; `use` must follow."""
        return self._shadows.path(turn, num_blocks)

    def hit(self, path: list[Stretch], depth: int, room: float, now_s: float) -> None:
        """Record that the cache had the first blocks of a prompt, on a path, up to a depth in blocks."""
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
        if is_won != self.is_won:
            self.is_won = is_won
            self._num_switches += 1
            _logger.info(
                "eviction goes by %s from now on: the learnt order is %+.0f blocks ahead, with a standard "
                "error of %.0f (switch %d)",
                "the learnt order" if is_won else "last use",
                self._lead,
                math.sqrt(self._variance),
                self._num_switches,
            )

    def details(self) -> dict[str, float]:
        """Return how much the shadows saved, and which of them is followed."""
        return {
            "is_learnt_order_used": float(self.is_won),
            "num_switches": float(self._num_switches),
            "shadow_blocks_saved_lru": float(self._num_saved[0]),
            "shadow_blocks_saved_reuse": float(self._num_saved[1]),
        }
