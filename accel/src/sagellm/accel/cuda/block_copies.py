"""Copies of whole blocks on the device, many in one launch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from sagellm.accel.cuda.kernel import kernel
from sagellm.accel.uploads import upload
from sagellm.core import BlockId

_TILE = 4096


@kernel
def move_blocks(
    source: tl.tensor,  # (any, words) int32
    target: tl.tensor,  # likewise
    source_ids: tl.tensor,  # (blocks,) int32
    target_ids: tl.tensor,  # (blocks,) int32
    words: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """Copy blocks; a grid of (blocks, tiles of words)."""
    one = tl.program_id(0)
    place = tl.program_id(1) * TILE + tl.arange(0, TILE)
    read = source + tl.load(source_ids + one).to(tl.int64) * words + place
    written = target + tl.load(target_ids + one).to(tl.int64) * words + place
    tl.store(written, tl.load(read, mask=place < words), mask=place < words)


def move(
    source: torch.Tensor, target: torch.Tensor, source_ids: Sequence[int], target_ids: Sequence[int]
) -> None:
    """Copy blocks of `source` (any, bytes) uint8 to distinct blocks of another `target`, without waiting."""
    ids = upload([np.array(source_ids, np.int32), np.array(target_ids, np.int32)], source.device)
    _launch(source, target, *ids)


def copy_blocks(memory: torch.Tensor, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
    """Copy in a memory (blocks, bytes) uint8 as if one pair came after the other; waits for nothing.

    Pairs that do not depend on an earlier one share a launch.
    """
    if not pairs:
        return
    ids = [each for run in independent_runs(pairs) for each in np.array(pairs[run], np.int32).T]
    on_device = iter(upload(ids, memory.device))
    for sources, targets in zip(on_device, on_device, strict=True):
        _launch(memory, memory, sources, targets)


def independent_runs(pairs: Sequence[tuple[BlockId, BlockId]]) -> Iterator[slice]:
    """Cut pairs into runs in which no block is written that another pair reads or writes."""
    begin = 0
    read: set[BlockId] = set()
    written: set[BlockId] = set()
    for place, (source, target) in enumerate(pairs):
        if source in written or target in written or target in read:
            yield slice(begin, place)
            begin, read, written = place, set(), set()
        read.add(source)
        written.add(target)
    yield slice(begin, len(pairs))


def _launch(
    source: torch.Tensor, target: torch.Tensor, source_ids: torch.Tensor, target_ids: torch.Tensor
) -> None:
    source, target = source.view(torch.int32), target.view(torch.int32)  # blocks have whole float32s
    words = source.shape[1]
    grid = (len(source_ids), triton.cdiv(words, _TILE))
    move_blocks[grid](source, target, source_ids, target_ids, words, TILE=_TILE, num_warps=8)
