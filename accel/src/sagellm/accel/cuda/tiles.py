"""Which tiles of query rows a step has, and in which items they are computed. Planned on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sagellm.core import AttentionSpec

Ints = npt.NDArray[np.int32]

SPLIT_TOKENS = 256
"""Tokens of KV in a split. Fixed, so that a row is summed in the same order in every batch."""

SHORT_TOKENS = 16
"""A sequence that computes at most this many tokens is computed in splits: a decode, or drafts to verify."""

_SHORT_ROWS, _LONG_ROWS = 16, 128
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

    counts: TileCounts
    sequences: Ints  # (tiles,)
    firsts: Ints  # (tiles,) first token, counted from the sequence's first row
    item_begins: Ints  # (tiles + 1,)
    item_tiles: Ints  # (items,)

    @property
    def arrays(self) -> list[Ints]:
        """What a launch reads of them."""
        return [self.sequences, self.firsts, self.item_begins, self.item_tiles]


def tiles_of(
    which: npt.NDArray[np.integer[Any]], num_new: Ints, lengths: Ints, *, tile_tokens: int, split: int
) -> Tiles:
    """Cut the rows of the sequences `which` into tiles of `tile_tokens` and these into items."""
    if not len(which):
        return Tiles(TileCounts(tile_tokens, split, 0, 0), _NONE, _NONE, np.zeros(1, np.int32), _NONE)
    counts, ends = num_new[which], lengths[which]
    per_sequence = -(-counts // tile_tokens)
    of = np.repeat(np.arange(len(which)), per_sequence)
    firsts = (np.arange(len(of)) - (np.cumsum(per_sequence) - per_sequence)[of]) * tile_tokens
    tile_ends = (ends - counts)[of] + np.minimum(firsts + tile_tokens, counts[of])
    num_items = -(-tile_ends // split) if split else np.ones(len(of), np.int32)
    item_tiles = np.repeat(np.arange(len(of), dtype=np.int32), num_items)
    return Tiles(
        counts=TileCounts(tile_tokens, split, len(of), len(item_tiles)),
        sequences=which[of].astype(np.int32),
        firsts=firsts.astype(np.int32),
        item_begins=np.concatenate(([0], np.cumsum(num_items))).astype(np.int32),
        item_tiles=item_tiles,
    )


def scratch_size(counts: TileCounts, spec: AttentionSpec) -> int:
    """Return how many float32s the splits of a launch take."""
    rows = counts.num_items * spec.num_heads * counts.tile_tokens if counts.split else 0
    return rows * (spec.head_dim + 2)


def short_tile_tokens(group: int) -> int:
    """Return the tokens of a tile of a short sequence with this many query heads for each KV head."""
    return max(1, _SHORT_ROWS // group)


def long_tile_tokens(group: int) -> int:
    """The same for a long sequence."""
    return max(1, _LONG_ROWS // group)


def plan_tiles(num_new: Ints, lengths: Ints, *, short: int, long: int) -> tuple[Tiles, Tiles]:
    """Plan two launches: short sequences in splits, long ones in larger tiles; both of so many tokens."""
    is_short = num_new <= SHORT_TOKENS
    return (
        tiles_of(np.flatnonzero(is_short), num_new, lengths, tile_tokens=short, split=SPLIT_TOKENS),
        tiles_of(np.flatnonzero(~is_short), num_new, lengths, tile_tokens=long, split=0),
    )
