"""Largest entries of long rows, without sorting them.

A row is read once, as maxima of 128 neighbours; later steps touch only the blocks that can matter.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

BLOCK = 128
_MANY = 2048
"""Above this many, selecting by blocks reads more than torch's own selection."""


class Candidates(NamedTuple):
    """The largest entries of each row, largest first; equal ones by falling id."""

    values: torch.Tensor  # (rows, count)
    ids: torch.Tensor  # (rows, count) int64


def block_maxima(scores: torch.Tensor) -> torch.Tensor:
    """Return (rows, blocks): the maximum of every 128 neighbours; the last block may be shorter.

    NaN anywhere in a block makes its maximum NaN.
    """
    maxima = _whole_blocks(scores).amax(-1)
    if scores.shape[1] % BLOCK == 0:
        return maxima
    tail = scores[:, maxima.shape[1] * BLOCK :].amax(-1, keepdim=True)
    return torch.cat((maxima, tail), dim=1)


def first_argmax(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's maximum and its lowest id, as torch.max does but in an eighth of the time."""
    vocab_size = scores.shape[1]
    if vocab_size <= BLOCK:
        values, ids = scores.max(-1)
        return values, ids
    values, blocks = block_maxima(scores).max(-1)
    # The window of a short last block begins in the previous block, whose entries are all smaller.
    start = (blocks * BLOCK).clamp(max=vocab_size - BLOCK)
    window = start[:, None] + torch.arange(BLOCK, device=scores.device)
    return values, start + scores.gather(1, window).argmax(-1)


def largest(scores: torch.Tensor, count: int) -> Candidates:
    """Return the `count` largest entries of each row of scores (rows, vocab).

    If equal entries do not all fit, it is unspecified which are chosen.
    """
    vocab_size = scores.shape[1]
    count = min(count, vocab_size)
    if count * 4 > vocab_size // BLOCK:
        values, ids = scores.topk(count, sorted=False)
    else:
        values, ids = _largest_by_blocks(scores, count)
    ids, order = ids.sort(descending=True)
    values, order = values.gather(1, order).sort(descending=True, stable=True)
    return Candidates(values, ids.gather(1, order))


def _largest_by_blocks(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """No entry outside the `count` blocks of the largest maxima is above the `count`-th largest entry."""
    rows, vocab_size = scores.shape
    blocks = _whole_blocks(scores)
    chosen = blocks.amax(-1).topk(count, sorted=False).indices  # (rows, count)
    entries = blocks[torch.arange(rows, device=scores.device)[:, None], chosen].flatten(1)
    num_blocks = blocks.shape[1]
    if vocab_size % BLOCK:
        entries = torch.cat((entries, scores[:, num_blocks * BLOCK :]), dim=1)
        chosen = torch.cat((chosen, chosen.new_full((rows, 1), num_blocks)), dim=1)
    values, places = entries.topk(count, sorted=False)
    return values, chosen.gather(1, places // BLOCK) * BLOCK + places % BLOCK


def kth_largest(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Return the k-th largest entry of each row, (rows, 1)."""
    vocab_size = scores.shape[1]
    if k <= _MANY:
        return largest(scores, k).values[:, -1:]
    return scores.kthvalue(vocab_size - k + 1, dim=-1, keepdim=True).values


def _whole_blocks(scores: torch.Tensor) -> torch.Tensor:
    num_blocks = scores.shape[1] // BLOCK
    return scores[:, : num_blocks * BLOCK].view(-1, num_blocks, BLOCK)
