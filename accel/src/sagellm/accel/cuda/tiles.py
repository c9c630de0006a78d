"""Which tiles of query rows a step has, and in which items they are computed. Planned on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

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


@dataclass(frozen=True)
class Tiles:
    """Tiles of sequences, and their items: one per split, or one if `split` is 0."""

    sequences: Ints  # (tiles,)
    firsts: Ints  # (tiles,) first token, counted from the sequence's first row
    item_tiles: Ints  # (items,)
    item_begins: Ints  # (tiles + 1,)
    tile_tokens: int
    split: int


def tiles_of(
    which: npt.NDArray[np.integer[Any]], num_new: Ints, lengths: Ints, *, tile_tokens: int, split: int
) -> Tiles:
    """Cut the rows of the sequences `which` into tiles of `tile_tokens` and these into items."""
    counts, ends = num_new[which], lengths[which]
    per_sequence = -(-counts // tile_tokens)
    of = np.repeat(np.arange(len(which)), per_sequence)
    firsts = (np.arange(len(of)) - (np.cumsum(per_sequence) - per_sequence)[of]) * tile_tokens
    tile_ends = (ends - counts)[of] + np.minimum(firsts + tile_tokens, counts[of])
    num_items = -(-tile_ends // split) if split else np.ones(len(of), np.int32)
    return Tiles(
        sequences=which[of].astype(np.int32),
        firsts=firsts.astype(np.int32),
        item_tiles=np.repeat(np.arange(len(of), dtype=np.int32), num_items),
        item_begins=np.concatenate(([0], np.cumsum(num_items))).astype(np.int32),
        tile_tokens=tile_tokens,
        split=split,
    )


def plan_tiles(num_new: Ints, lengths: Ints, group: int) -> list[Tiles]:
    """Plan the launches of a step: short sequences in splits, a launch for each size of tile; long ones.

    `group` is the number of query heads for each KV head.
    """
    sizes = np.array([short_tile_tokens(count, group) for count in range(1, SHORT_TOKENS + 1)])
    short, long = np.flatnonzero(num_new <= SHORT_TOKENS), np.flatnonzero(num_new > SHORT_TOKENS)
    size_of = sizes[num_new[short] - 1]
    plan = [
        tiles_of(short[size_of == size], num_new, lengths, tile_tokens=size, split=SPLIT_TOKENS)
        for size in np.unique(size_of).tolist()
    ]
    if len(long):
        plan.append(tiles_of(long, num_new, lengths, tile_tokens=max(1, _MOST_ROWS // group), split=0))
    return plan


def short_tile_tokens(num_new: int, group: int) -> int:
    """Return the tokens of the tiles of a short sequence: all that it computes, so that KV is read once.

    Rounded up, as each size is a launch of its own. It depends on the sequence alone, as the last bits of its
    rows may depend on the tile.
    """
    if num_new == 1:
        return 1
    rounded = 1 << (num_new - 1).bit_length()
    return min(max(rounded, _DRAFT_ROWS // group), max(1, _MOST_ROWS // group))


def upload(arrays: Sequence[Ints], device: torch.device) -> list[torch.Tensor]:
    """Copy int32 arrays to the device in one piece, without waiting for it."""
    packed = torch.from_numpy(np.concatenate(arrays))
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    return list(packed.split([len(array) for array in arrays]))  # type: ignore[no-untyped-call]
