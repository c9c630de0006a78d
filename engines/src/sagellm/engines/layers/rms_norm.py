"""Root-mean-square normalisation, with the residual connection folded in."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

_TILE_TOKENS = 512
"""rms_norm makes float32 copies of its input: those of a tile stay in cache, those of 2,048 tokens do not."""


class Normalised(NamedTuple):
    """A layer's normalised input, and the residual sum that bypasses the layer."""

    hidden: torch.Tensor
    residual: torch.Tensor


class RMSNorm:
    """`x / sqrt(mean(x²) + eps) * weight` over the last dimension, computed in float32.

    Source: arXiv 1910.07467.
    """

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight  # (hidden,)
        self.eps = eps
        self._shape = tuple(weight.shape)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normalised:
        """Add the residual to x, keep the sum as the new residual, and normalise it."""
        total = x if residual is None else x + residual
        return Normalised(functional.rms_norm(total, self._shape, self.weight, self.eps), total)


class HeadNorm:
    """RMSNorm of each query and key head over its own dimensions, all heads in one go.

    `weight` has one row per head, so that queries and keys, which lie side by side, share the call.
    """

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight  # (heads + kv_heads, dim)
        self.eps = eps
        self._shape = (weight.shape[-1],)

    @classmethod
    def of(
        cls, query: torch.Tensor, key: torch.Tensor, num_heads: int, num_kv_heads: int, eps: float
    ) -> HeadNorm:
        """Make one of the two weights (dim,) of a checkpoint."""
        return cls(torch.cat((query.expand(num_heads, -1), key.expand(num_kv_heads, -1))), eps)

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """Normalise (tokens, heads + kv_heads, dim)."""
        normalised = torch.empty_like(heads)
        tiles = torch.split(heads, _TILE_TOKENS), torch.split(normalised, _TILE_TOKENS)
        for part, out in zip(*tiles, strict=True):
            torch.mul(functional.rms_norm(part, self._shape, None, self.eps), self.weight, out=out)
        return normalised
