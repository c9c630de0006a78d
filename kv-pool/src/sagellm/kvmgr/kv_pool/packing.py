"""Moves that gather the pieces which are held, so that what is free lies in one run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection

from sagellm.kvmgr.kv_pool.extents import LEVELS, Extent, KVPoolConfig


def pack(held: Collection[Extent], config: KVPoolConfig) -> list[tuple[Extent, Extent]]:
    """Return moves (from, to), each to where nothing lies once those before it are done.

    From tokens to sequences, the emptiest larger pieces give their parts to the free places of the fullest;
    at last what lies at the end of the pool goes to free places at its begin. A piece may move once a size.
    """
    now = {extent: extent.start for extent in held}
    moves = []
    for level in reversed(range(len(LEVELS))):
        size = config.size_of(LEVELS[level])
        inside = LEVELS[level:]
        units = defaultdict(list)  # by start: a piece of this size, or the smaller ones that lie in one
        for extent, start in now.items():
            if extent.granularity in inside:
                units[start - start % size].append(extent)
        kept: Collection[int]
        if level:
            kept = _fullest(units, size, config.size_of(LEVELS[level - 1]))
        else:
            kept = range(0, len(units) * size, size)
        leaving = [start for start in units if start not in kept]
        free = [start for start in kept if start not in units]
        for source, target in zip(leaving, free, strict=False):
            for extent in units[source]:
                before = Extent(extent.granularity, now[extent])
                now[extent] += target - source
                moves.append((before, Extent(extent.granularity, now[extent])))
    return moves


def _fullest(units: Collection[int], size: int, parent_size: int) -> dict[int, None]:
    """Return all places in as many parents as the units fill, those with most units in them."""
    num_units = Counter(start - start % parent_size for start in units)
    num_kept = -(-len(units) * size // parent_size)
    return {
        start: None
        for parent, _ in num_units.most_common(num_kept)
        for start in range(parent, parent + parent_size, size)
    }
