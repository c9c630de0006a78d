"""Draws tokens on the device."""

from __future__ import annotations

from typing import Protocol

import torch
import triton

from sagellm.accel.cuda import sampling_kernels as kernels
from sagellm.accel.cuda.kernel import next_power_of_2
from sagellm.accel.cuda.support import on_device

_BLOCK = 128
_TILE_BLOCKS = 32
_CAPACITY = 2048
_TILE = 2048

_CHANGED_TILE = 4096
_EDITS = 256
_COUNTED = 256


class Changes(Protocol):
    """What changes rows of logits: penalties, then edits; and masks. All of it lies on the device.

    The columns of `plan` (changed, 8) are a row of the logits; its row of the counts; its row of the masks;
    where its drafts begin, and their number; repetition, frequency and presence penalty. A row of -1 is none.
    """

    @property
    def plan(self) -> torch.Tensor:
        """What to change, float64."""

    @property
    def counts(self) -> torch.Tensor:
        """How often tokens occur in outputs (any, vocab) int32, and 2³⁰ more if one is in the prompt."""

    @property
    def drafts(self) -> torch.Tensor:
        """Tokens (any,) int64 that count as those of the output."""

    @property
    def masks(self) -> torch.Tensor:
        """Tokens that may be drawn (any, ceil(vocab / 32)) int32: bit t % 32 of word t // 32."""

    @property
    def edited(self) -> torch.Tensor:
        """Logits that something is added to after penalties (edits,) int64: row · vocab + token."""

    @property
    def addends(self) -> torch.Tensor:
        """What is added (edits,) float32; -inf forbids, and may stand twice, any other once."""


class TritonDraw:
    """Draws tokens on a GPU. Nothing that it does waits for the device."""

    def __call__(self, logits: torch.Tensor, settings: torch.Tensor) -> torch.Tensor:
        """Return what `draw_tokens` does."""
        return draw_tokens(logits, settings)

    def logprobs(
        self, logits: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor, num_top: int
    ) -> torch.Tensor:
        """Return what `token_logprobs` does."""
        return token_logprobs(logits, tokens, rows, num_top)

    def count(
        self, counts: torch.Tensor, begins: torch.Tensor, sources: torch.Tensor, last: torch.Tensor
    ) -> None:
        """Add to `counts` (any, vocab) int32, in rows that begin at `begins` (tokens,) int64.

        `sources` (tokens,) int64 are tokens, or -1 - the place in `last` (any,) int64 where one is.
        """
        with on_device(counts.device):
            grid = (triton.cdiv(len(sources), _COUNTED),)
            kernels.count_tokens[grid](
                counts, begins, sources, last, len(sources), TOKENS=_COUNTED, num_warps=4
            )

    def change(self, logits: torch.Tensor, changes: Changes) -> None:
        """Change rows of logits (rows, vocab), float32 and contiguous, in place."""
        vocab_size = logits.shape[1]
        num_changed, num_edits = len(changes.plan), len(changes.edited)
        with on_device(logits.device):
            if num_changed:
                kernels.change[(num_changed, triton.cdiv(vocab_size, _CHANGED_TILE))](
                    logits,
                    changes.plan,
                    changes.counts,
                    changes.drafts,
                    changes.masks,
                    vocab_size,
                    triton.cdiv(vocab_size, 32),
                    TILE=_CHANGED_TILE,
                    num_warps=8,
                )
            if num_edits:
                kernels.edit[(triton.cdiv(num_edits, _EDITS),)](
                    logits, changes.edited, changes.addends, num_edits, EDITS=_EDITS, num_warps=4
                )


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


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor, num_top: int
) -> torch.Tensor:
    """Return log-probabilities of tokens, (scored, 2 + 2 * num_top) float64 on the device.

    `rows` (2, scored) int64 says where the logits (any, vocab), float32 and contiguous, of each lie, and
    where its token (any,) int64; what belongs to a token of -1 is unspecified. The columns are the token's
    log-probability and its rank, that is how many logits are not smaller; then the log-probabilities of the
    `num_top` ≤ vocab likeliest, of equal ones those with the lowest ids, largest first; then their ids.
    Sums are in float64 of float32 exponentials. Waits for nothing.
    """
    vocab_size, num_scored = logits.shape[1], rows.shape[1]
    num_blocks = triton.cdiv(vocab_size, _BLOCK)
    num_tiles = triton.cdiv(num_blocks, _TILE_BLOCKS)
    maxima = logits.new_empty(num_scored, num_blocks)
    masses = logits.new_empty(num_scored, num_blocks, dtype=torch.float64)
    num_above = logits.new_empty(num_scored, num_tiles, dtype=torch.int32)
    scores = logits.new_empty(num_scored, 2 + 2 * num_top, dtype=torch.float64)
    summed = (logits, tokens, rows, maxima, masses, num_above)
    with on_device(logits.device):
        kernels.score_blocks[(num_scored, num_tiles)](
            *summed, vocab_size, num_blocks, TILE_BLOCKS=_TILE_BLOCKS, num_warps=4
        )
        kernels.score_tokens[(num_scored,)](
            *summed,
            scores,
            num_top,
            vocab_size,
            num_blocks,
            num_tiles,
            BLOCKS=next_power_of_2(num_blocks),
            num_warps=8,
        )
    return scores


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
