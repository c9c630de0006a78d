"""Draws tokens on the device."""

from __future__ import annotations

import torch
import triton

from sagellm.accel.cuda import sampling_kernels as kernels
from sagellm.accel.cuda.kernel import next_power_of_2
from sagellm.accel.cuda.support import on_device

_BLOCK = 128
_TILE_BLOCKS = 32
_CAPACITY = 2048
_TILE = 2048


def draw_tokens(logits: torch.Tensor, settings: torch.Tensor) -> torch.Tensor:
    """Return a token for each row of logits (rows, vocab) float32, as (rows,) int64 on the device.

    `settings` is (rows, 5) float64: temperature (0: the largest logit), min-p, top-k (0: none), 1 - top-p
    (negative: none), and a uniform number in [0, 1). -1 means that no token can be drawn, because a logit is
    NaN or infinite or all are masked. Waits for nothing.
    """
    rows = len(logits)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        with on_device(logits.device):
            _launch(logits.float().contiguous(), settings, tokens)
    return tokens


def _launch(logits: torch.Tensor, settings: torch.Tensor, tokens: torch.Tensor) -> None:
    rows, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, _BLOCK)
    maxima = logits.new_empty(rows, num_blocks)
    masses = logits.new_empty(rows, num_blocks, dtype=torch.float64)
    candidates = logits.new_empty(rows, _CAPACITY)
    candidate_ids = logits.new_empty(rows, _CAPACITY, dtype=torch.int32)
    num_candidates = logits.new_empty(rows, dtype=torch.int32)
    blocks = next_power_of_2(num_blocks)
    kernels.block_statistics[(rows, triton.cdiv(num_blocks, _TILE_BLOCKS))](
        logits, settings, maxima, masses, vocab_size, num_blocks, TILE_BLOCKS=_TILE_BLOCKS, num_warps=4
    )
    kernels.select_candidates[(rows,)](
        logits,
        settings,
        maxima,
        candidates,
        candidate_ids,
        num_candidates,
        vocab_size,
        num_blocks,
        BLOCKS=blocks,
        TILE_BLOCKS=_TILE_BLOCKS,
        CAPACITY=_CAPACITY,
        num_warps=8,
    )
    kernels.draw[(rows,)](
        logits,
        settings,
        maxima,
        masses,
        candidates,
        candidate_ids,
        num_candidates,
        tokens,
        vocab_size,
        num_blocks,
        BLOCKS=blocks,
        CAPACITY=_CAPACITY,
        TILE=_TILE,
        num_warps=8,
    )
