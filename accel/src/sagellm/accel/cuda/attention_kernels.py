"""Attention over paged KV: tiles of query rows, each over all its keys at once or in splits of fixed length.

A tile is up to `TILE_TOKENS` neighbouring tokens of one sequence with all query heads of one KV head, so that
these share each read of KV. Row `r` of a tile is the tile's token `r // GROUP` and query head `r % GROUP` of
the KV head. Splits begin at multiples of `SPLIT` tokens of the sequence, whatever else is in the batch, and
are merged in order: a row has the same bits alone and batched.
"""

from __future__ import annotations

import triton.language as tl

from sagellm.accel.cuda.kernel import device_function, kernel

LOG2_E = tl.constexpr(1.4426950408889634)


@device_function
def tile_begin(first: tl.tensor, computed: tl.tensor, WINDOW: tl.constexpr) -> tl.tensor:
    """Return the first position that a tile's first token sees; the token is at `computed + first`."""
    begin = 0
    if WINDOW:
        begin = tl.maximum(computed + first - WINDOW + 1, 0)
    return begin


@device_function
def capped(scores: tl.tensor, SOFT_CAP: tl.constexpr) -> tl.tensor:
    """Return `cap * tanh(score / cap)`; no cap is 0."""
    if SOFT_CAP > 0.0:
        scores = SOFT_CAP * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E / SOFT_CAP)) + 1.0))
    return scores


@device_function
def attend_range(  # noqa: PLR0913
    query: tl.tensor,  # (BLOCK_M, BLOCK_D)
    query_position: tl.tensor,  # (BLOCK_M,) of each row's token
    keys: tl.tensor,  # this layer's and head's keys of block 0
    key_scales: tl.tensor,  # likewise; unused without scales
    blocks: tl.tensor,  # the sequence's block table
    begin: tl.tensor,
    end: tl.tensor,
    block_stride: tl.tensor,
    value_offset: tl.tensor,  # elements from a key to its value
    scale_stride: tl.tensor,  # float32s from a block to the next
    value_scale_offset: tl.tensor,
    scale: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    IS_SCALED: tl.constexpr,
    COMPUTE: tl.constexpr,
) -> tl.tensor:
    """Return weighted sums of values, sums of weights and maxima of scores, over positions `[begin, end)`."""
    dims = tl.arange(0, BLOCK_D)
    total = tl.zeros((query.shape[0], BLOCK_D), tl.float32)
    weight_sum = tl.zeros((query.shape[0],), tl.float32)
    largest = tl.full((query.shape[0],), -float("inf"), tl.float32)
    for start in range(begin // BLOCK_N * BLOCK_N, end, BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        is_key = position < end
        block = tl.load(blocks + position // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        within = position % BLOCK_SIZE
        offset = block * block_stride + within * D
        mask = is_key[:, None] & (dims < D)[None, :]
        key = tl.load(keys + offset[:, None] + dims[None, :], mask=mask, other=0.0)
        scores = tl.dot(query, tl.trans(key.to(COMPUTE)), input_precision="ieee")
        if IS_SCALED:
            scale_of = key_scales + block * scale_stride + within
            scores *= tl.load(scale_of, mask=is_key, other=0.0)[None, :]
        scores = capped(scores * scale, SOFT_CAP) * LOG2_E
        is_seen = position[None, :] <= query_position[:, None]
        if WINDOW:
            is_seen &= position[None, :] > query_position[:, None] - WINDOW
        scores = tl.where(is_seen & is_key[None, :], scores, -float("inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        pivot = tl.where(new_largest == -float("inf"), 0.0, new_largest)  # a row that sees no key so far
        weights = tl.exp2(scores - pivot[:, None])
        shrink = tl.exp2(largest - pivot)
        weight_sum = weight_sum * shrink + tl.sum(weights, 1)
        value = tl.load(keys + value_offset + offset[:, None] + dims[None, :], mask=mask, other=0.0)
        if IS_SCALED:
            weights *= tl.load(scale_of + value_scale_offset, mask=is_key, other=0.0)[None, :]
        total = total * shrink[:, None] + tl.dot(
            weights.to(COMPUTE), value.to(COMPUTE), input_precision="ieee"
        )
        largest = new_largest
    return total, weight_sum, largest


@kernel
def attend(  # noqa: PLR0913
    query: tl.tensor,  # (rows, heads, D)
    kv: tl.tensor,
    kv_scales: tl.tensor,  # the same memory as float32
    tables: tl.tensor,  # (sequences, table_stride) block ids
    row_begins: tl.tensor,  # (sequences,) first row of each
    num_new: tl.tensor,  # (sequences,) rows of each
    lengths: tl.tensor,  # (sequences,) tokens of each, the new ones included
    tile_sequences: tl.tensor,  # (tiles,)
    tile_firsts: tl.tensor,  # (tiles,) first token of a tile, counted from its sequence's first row
    item_tiles: tl.tensor,  # (items,) a tile's items are its splits, in order
    item_begins: tl.tensor,  # (tiles + 1,) first item of each tile
    num_tiles: tl.tensor,
    out: tl.tensor,  # (rows, heads, D), if there are no splits
    partial: tl.tensor,  # (items, KV heads, TILE_TOKENS * GROUP, D) float32
    partial_stats: tl.tensor,  # (items, KV heads, TILE_TOKENS * GROUP, 2): sum of weights, largest score
    table_stride: tl.tensor,
    layer_offset: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    value_offset: tl.tensor,
    scales_offset: tl.tensor,
    scale_stride: tl.tensor,
    value_scale_offset: tl.tensor,
    scale: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,  # tokens; 0: a tile is one item and writes `out`
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    IS_SCALED: tl.constexpr,
    COMPUTE: tl.constexpr,
) -> None:
    """Compute items; programs of axis 0 take them in turn, those of axis 1 are the KV heads."""
    head = tl.program_id(1)
    row = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    layer_kv = kv + layer_offset + head * head_stride
    layer_scales = kv_scales + scales_offset + head * BLOCK_SIZE
    num_items = tl.load(item_begins + num_tiles)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        tile = tl.load(item_tiles + item)
        sequence = tl.load(tile_sequences + tile)
        first = tl.load(tile_firsts + tile)
        count = tl.load(num_new + sequence)
        computed = tl.load(lengths + sequence) - count
        token = first + row // GROUP
        is_row = (row < TILE_TOKENS * GROUP) & (token < count)
        query_row = (tl.load(row_begins + sequence) + token).to(tl.int64)
        place = (query_row * NUM_KV_HEADS * GROUP + head * GROUP + row % GROUP) * D
        mask = is_row[:, None] & (dims < D)[None, :]
        rows = tl.load(query + place[:, None] + dims[None, :], mask=mask, other=0.0).to(COMPUTE)

        begin = tile_begin(first, computed, WINDOW)
        end = computed + tl.minimum(first + TILE_TOKENS, count)
        if SPLIT:
            split = item - tl.load(item_begins + tile)
            begin = tl.maximum(begin, split * SPLIT)
            end = tl.minimum(end, (split + 1) * SPLIT)
        total, weight_sum, largest = attend_range(
            rows,
            computed + token,
            layer_kv,
            layer_scales,
            tables + sequence.to(tl.int64) * table_stride,
            begin,
            end,
            block_stride,
            value_offset,
            scale_stride,
            value_scale_offset,
            scale,
            BLOCK_SIZE,
            BLOCK_N,
            D,
            BLOCK_D,
            WINDOW,
            SOFT_CAP,
            IS_SCALED,
            COMPUTE,
        )
        if SPLIT:
            part = row.to(tl.int64) + (item * NUM_KV_HEADS + head) * (TILE_TOKENS * GROUP)
            tl.store(partial + part[:, None] * D + dims[None, :], total, mask=mask)
            tl.store(partial_stats + part * 2, weight_sum, mask=is_row)
            tl.store(partial_stats + part * 2 + 1, largest, mask=is_row)
        else:
            result = total / tl.where(is_row, weight_sum, 1.0)[:, None]
            tl.store(out + place[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=mask)


@kernel
def merge_splits(  # noqa: PLR0913
    partial: tl.tensor,
    partial_stats: tl.tensor,
    row_begins: tl.tensor,
    num_new: tl.tensor,
    lengths: tl.tensor,
    tile_sequences: tl.tensor,
    tile_firsts: tl.tensor,
    item_begins: tl.tensor,
    out: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
) -> None:
    """Merge the splits of a tile, in order; a grid of (tiles, KV heads). A tile without items gives zeros."""
    tile, head = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    sequence = tl.load(tile_sequences + tile)
    first = tl.load(tile_firsts + tile)
    count = tl.load(num_new + sequence)
    computed = tl.load(lengths + sequence) - count
    token = first + row // GROUP
    is_row = (row < TILE_TOKENS * GROUP) & (token < count)
    mask = is_row[:, None] & (dims < D)[None, :]

    total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    weight_sum = tl.zeros((BLOCK_M,), tl.float32)
    largest = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    begin_item = tl.load(item_begins + tile)
    begin_split = tile_begin(first, computed, WINDOW) // SPLIT
    for item in range(begin_item + begin_split, tl.load(item_begins + tile + 1)):
        part = row.to(tl.int64) + (item * NUM_KV_HEADS + head) * (TILE_TOKENS * GROUP)
        split_sum = tl.load(partial_stats + part * 2, mask=is_row, other=0.0)
        split_largest = tl.load(partial_stats + part * 2 + 1, mask=is_row, other=-float("inf"))
        split_total = tl.load(partial + part[:, None] * D + dims[None, :], mask=mask, other=0.0)
        new_largest = tl.maximum(largest, split_largest)
        pivot = tl.where(new_largest == -float("inf"), 0.0, new_largest)
        shrink, split_shrink = tl.exp2(largest - pivot), tl.exp2(split_largest - pivot)
        total = total * shrink[:, None] + split_total * split_shrink[:, None]
        weight_sum = weight_sum * shrink + split_sum * split_shrink
        largest = new_largest
    result = total / tl.where(weight_sum > 0.0, weight_sum, 1.0)[:, None]
    query_row = (tl.load(row_begins + sequence) + token).to(tl.int64)
    place = (query_row * NUM_KV_HEADS * GROUP + head * GROUP + row % GROUP) * D
    tl.store(out + place[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=mask)
