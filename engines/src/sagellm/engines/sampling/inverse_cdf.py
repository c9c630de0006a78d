"""Exact draws from whole rows by inverse transform in two levels."""

from __future__ import annotations

import torch

from sagellm.engines.sampling.selection import BLOCK


def softmax_into(
    scratch: torch.Tensor, scores: torch.Tensor, temperature: torch.Tensor | None = None
) -> torch.Tensor:
    """Return softmax(scores / temperature) in the scratch space, (rows, vocab rounded up to 128s).

    Entries beyond the vocabulary have probability 0. `temperature` is (rows, 1), None for 1. Each row's
    result depends on that row alone. float32 sums over long rows leave the probabilities of a row with a
    common error of up to 3e-5; for higher precision, divide by `block_masses(…).sum(1)`.
    """
    rows, vocab_size = scores.shape
    width = padded(vocab_size)
    out = scratch[: rows * width].view(rows, width)
    if temperature is None and width == vocab_size:
        return torch.softmax(scores, -1, out=out)
    out[:, vocab_size:] = -torch.inf
    if temperature is None:
        out[:, :vocab_size] = scores
    else:
        torch.div(scores, temperature, out=out[:, :vocab_size])
    return torch.softmax(out, -1, out=out)


def padded(vocab_size: int) -> int:
    """Round a vocabulary up to whole blocks."""
    return -(-vocab_size // BLOCK) * BLOCK


def block_masses(probabilities: torch.Tensor) -> torch.Tensor:
    """Return the sum of every 128 neighbours of (rows, padded vocab), in float64."""
    return probabilities.view(probabilities.shape[0], -1, BLOCK).sum(-1).double()


def draw(probabilities: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one id and the total weight of each row of (rows, padded vocab), given numbers (rows, 1).

    The number times the total falls into one block of the cumulative sum, and the remainder selects one token
    there. A token of weight 0 is never drawn. A NaN total means that the row is not a distribution.
    """
    rows = probabilities.shape[0]
    blocks = probabilities.view(rows, -1, BLOCK)
    up_to = block_masses(probabilities).cumsum(1)
    target = uniform * up_to[:, -1:]
    # The first block whose cumulative sum exceeds the target must have weight.
    block = torch.searchsorted(up_to, target, right=True).clamp(max=blocks.shape[1] - 1)
    before = torch.where(block > 0, up_to.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = blocks[torch.arange(rows, device=block.device), block[:, 0]].double().cumsum(1)
    # A block's float32 sum may be a hair above its float64 one: then take the last token that has weight.
    last = torch.searchsorted(inside, inside[:, -1:].contiguous())
    place = torch.minimum(torch.searchsorted(inside, target - before, right=True), last)
    return (block * BLOCK + place)[:, 0], up_to[:, -1]
