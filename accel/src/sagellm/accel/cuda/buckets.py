"""The sizes to which steps are padded, so that a graph fits them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sagellm.accel.cuda.tiles import (
    SHORT_TOKENS,
    SPLIT_TOKENS,
    Ints,
    TileCounts,
    Tiles,
    long_tile_tokens,
    scratch_size,
    short_tile_tokens,
)
from sagellm.accel.uploads import packed_length
from sagellm.core import AttentionSpec, ConfigError, ModelSpec
from sagellm.core.protocols.forward import StepLimits

DECODES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Sequences in steps that compute one token of each."""

ROWS = (8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Tokens computed in any other steps: those with prefills or drafts."""

SCRATCH_BYTES = 128 << 20
"""Most memory for the results of splits, which all graphs share."""

_CAPTURE_BYTES = 128 << 20
"""What cuBLAS takes for the stream on which graphs are captured, and the graphs themselves: a guess."""


@dataclass(frozen=True)
class Bucket:
    """What a graph has room for. Padding belongs to one more sequence, which computes nothing."""

    num_rows: int
    num_seqs: int
    launches: tuple[TileCounts, ...]

    @property
    def lengths(self) -> list[int]:
        """The lengths of its `planned_arrays`."""
        lengths = [self.num_seqs + 1] * 3
        for each in self.launches:
            lengths += [each.num_tiles, each.num_tiles, each.num_tiles + 1, each.num_items]
        return lengths

    def padded(self, arrays: Sequence[Ints], tiles: Sequence[Tiles]) -> list[Ints] | None:
        """Return `planned_arrays` of these tiles with padding, or None if they do not fit."""
        fillers = [0, 0, 0]
        for each in tiles:
            fillers += [self.num_seqs, 0, each.counts.num_items, 0]
        lengths = self.lengths
        if any(len(array) > length for array, length in zip(arrays, lengths, strict=True)):
            return None
        padded = [np.full(length, filler, np.int32) for length, filler in zip(lengths, fillers, strict=True)]
        for target, array in zip(padded, arrays, strict=True):
            target[: len(array)] = array
        return padded


def check_sizes(option: str, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the sizes that an option lists, in order. Raises ConfigError unless they are positive ints."""
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ConfigError(
            f"{option} of the backend cuda is {sizes!r}; it is a list of positive numbers, [] for no graphs"
        )
    return tuple(sorted(set(sizes)))


def decode_buckets(sizes: Sequence[int], limits: StepLimits, spec: AttentionSpec) -> list[Bucket]:
    """Return a bucket for each number of sequences that steps may be padded to."""
    sizes = _needed(sizes, limits.max_num_seqs)
    return [Bucket(size, size, (_decodes(size, limits, spec),)) for size in sizes]


def row_buckets(sizes: Sequence[int], limits: StepLimits, spec: AttentionSpec) -> list[Bucket]:
    """Return a bucket for each number of tokens that steps may be padded to."""
    group = spec.num_heads // spec.num_kv_heads
    buckets = []
    for size in _needed(sizes, limits.max_num_batched_tokens):
        num_seqs = min(size, limits.max_num_seqs)
        has_own_tiles = short_tile_tokens(2, group) > 1  # drafts: not with 128 query heads for a KV head
        launches = [_decodes(num_seqs if has_own_tiles else size, limits, spec)]
        counts = range(2, min(size, SHORT_TOKENS) + 1)
        for tokens in sorted({short_tile_tokens(count, group) for count in counts} - {1}):
            num_tiles = min(num_seqs, size // 2) + size // tokens
            num_items = min(num_tiles * _longest(limits), _room(tokens, spec))
            launches.append(TileCounts(tokens, SPLIT_TOKENS, num_tiles, num_items))
        if num_long := size // (
            SHORT_TOKENS + 1
        ):  # sequences, each of which may have a tile that is not full
            tokens = long_tile_tokens(group)
            most = num_long + size // tokens
            launches.append(TileCounts(tokens, 0, most, most))
        buckets.append(Bucket(size, num_seqs, tuple(launches)))
    return buckets


def _decodes(num_seqs: int, limits: StepLimits, spec: AttentionSpec) -> TileCounts:
    return TileCounts(1, SPLIT_TOKENS, num_seqs, min(num_seqs * _longest(limits), _room(1, spec)))


def graph_bytes(buckets: Sequence[Bucket], num_blocks: int, spec: ModelSpec, dtype: torch.dtype) -> int:
    """Return about how much memory graphs take: buffers, the largest one's activations, and what is kept."""
    rows = max(each.num_rows for each in buckets)
    heads, sizes = spec.attention[0], spec.geometry
    num_values = max(scratch_size(counts, heads) for each in buckets for counts in each.launches)
    num_planned = max(packed_length(each.lengths, 4) for each in buckets)
    tables = max(each.num_seqs for each in buckets) * num_blocks
    of_heads = (3 * heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
    # The embedding, its sum with an update, the update and the result; queries, keys and values; the gate.
    per_row = 5 * sizes.hidden_size + of_heads + 3 * sizes.intermediate_size
    return (
        8 * (3 * rows + tables)
        + 4 * (num_planned + num_values)
        + rows * per_row * dtype.itemsize
        + _CAPTURE_BYTES
    )


def _needed(sizes: Sequence[int], most: int) -> list[int]:
    """Leave out what is larger than needed for `most`."""
    return [size for place, size in enumerate(sizes) if not place or sizes[place - 1] < most]


def _longest(limits: StepLimits) -> int:
    return -(-limits.max_model_len // SPLIT_TOKENS)


def _room(tile_tokens: int, spec: AttentionSpec) -> int:
    """Return the splits for which there is memory."""
    return SCRATCH_BYTES // (4 * spec.num_heads * tile_tokens * (spec.head_dim + 2))
