"""Which tiles of query rows a step has, and in which items they are computed. Planned on the host."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from sagellm.core import AttentionSpec

Ints = npt.NDArray[np.int32]

SPLIT_TOKENS = 256
"""Tokens of KV in a split. Fixed, so that a row is summed in the same order in every batch."""

SHORT_TOKENS = 17
"""A sequence that computes at most this many tokens is computed in splits: a decode, or 16 drafts to verify
and the token before them.
"""

_DRAFT_ROWS, _MOST_ROWS = 32, 128
"""Rows of the smallest tile of drafts, padding included: with so few, reading KV takes longer than computing.
And of the largest tile.
"""

_NONE: Ints = np.empty(0, np.int32)


@dataclass(frozen=True)
class TileCounts:
    """How much a launch computes, or has room for."""

    tile_tokens: int
    split: int  # tokens of KV in an item; 0: a tile is one item
    num_tiles: int
    num_items: int


@dataclass(frozen=True)
class Tiles:
    """Tiles of sequences, and their items, in the order in which a launch takes them."""

    tile_tokens: int
    split: int
    sequences: Ints  # (tiles,)
    firsts: Ints  # (tiles,) first token, counted from the sequence's first row
    item_begins: Ints  # (tiles + 1,)
    item_tiles: Ints  # (items,)

    @property
    def counts(self) -> TileCounts:
        """How much it is."""
        return TileCounts(self.tile_tokens, self.split, len(self.sequences), len(self.item_tiles))

    @property
    def arrays(self) -> list[Ints]:
        """What a launch reads of them."""
        return [self.sequences, self.firsts, self.item_begins, self.item_tiles]


def tiles_of(
    which: npt.NDArray[np.integer[Any]], num_new: Ints, lengths: Ints, *, tile_tokens: int, split: int
) -> Tiles:
    """Cut the rows of the sequences `which` into tiles of `tile_tokens` and these into items."""
    if not len(which):
        return Tiles(tile_tokens, split, _NONE, _NONE, np.zeros(1, np.int32), _NONE)
    counts, ends = num_new[which], lengths[which]
    per_sequence = -(-counts // tile_tokens)
    of = np.repeat(np.arange(len(which)), per_sequence)
    firsts = (np.arange(len(of)) - (np.cumsum(per_sequence) - per_sequence)[of]) * tile_tokens
    tile_ends = (ends - counts)[of] + np.minimum(firsts + tile_tokens, counts[of])
    num_items = -(-tile_ends // split) if split else np.ones(len(of), np.int32)
    return Tiles(
        tile_tokens=tile_tokens,
        split=split,
        sequences=which[of].astype(np.int32),
        firsts=firsts.astype(np.int32),
        item_begins=np.concatenate(([0], np.cumsum(num_items))).astype(np.int32),
        item_tiles=np.repeat(np.arange(len(of), dtype=np.int32), num_items),
    )


def scratch_size(counts: TileCounts, spec: AttentionSpec) -> int:
    """Return how many float32s the splits of a launch take."""
    rows = counts.num_items * spec.num_heads * counts.tile_tokens if counts.split else 0
    return rows * (spec.head_dim + 2)


def short_tile_tokens(num_new: int, group: int) -> int:
    """Return the tokens of the tiles of a short sequence: all that it computes, so that KV is read once.

    Rounded up, as each size is a launch of its own. It depends on the sequence alone, as the last bits of its
    rows may depend on the tile. `group` is the number of query heads for each KV head.
    """
    if num_new == 1:
        return 1
    rounded = 1 << (num_new - 1).bit_length()
    return min(max(rounded, _DRAFT_ROWS // group), long_tile_tokens(group))


def long_tile_tokens(group: int) -> int:
    """Return the tokens of the tiles of other sequences."""
    return max(1, _MOST_ROWS // group)


def plan_tiles(num_new: Ints, lengths: Ints, group: int) -> list[Tiles]:
    """Plan the launches of a step: those of `plan_all_tiles` that have something to compute."""
    return [each for each in plan_all_tiles(num_new, lengths, group) if len(each.sequences)]


def plan_all_tiles(num_new: Ints, lengths: Ints, group: int) -> list[Tiles]:
    """Plan a launch for each size of the tiles of short sequences, in splits, and one for all others."""
    sizes = _short_sizes(group)
    size_of = np.where(num_new <= SHORT_TOKENS, sizes[np.minimum(num_new, SHORT_TOKENS) - 1], 0)
    plan = [
        tiles_of((size_of == size).nonzero()[0], num_new, lengths, tile_tokens=size, split=SPLIT_TOKENS)
        for size in sorted(set(sizes.tolist()))
    ]
    long = (size_of == 0).nonzero()[0]
    return [*plan, tiles_of(long, num_new, lengths, tile_tokens=long_tile_tokens(group), split=0)]


@cache
def _short_sizes(group: int) -> Ints:
    """Return the sizes of tiles by the number of tokens less one."""
    return np.array([short_tile_tokens(count, group) for count in range(1, SHORT_TOKENS + 1)], np.int32)
