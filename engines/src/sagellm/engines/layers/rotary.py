"""Rotary position embeddings."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sagellm.accel.rope_scaling import rope_frequencies
from sagellm.core import RopeSpec

_MIN_ROWS = 512


class RotaryTables(NamedTuple):
    """Cosines and signed sines of a step's positions, shared by all layers.

    The first half of `sin` is negated, so that a rotation is one multiplication and one fused
    multiply-add with the halves of a head swapped.
    """

    cos: torch.Tensor  # (tokens, 1, rotary_dim)
    sin: torch.Tensor  # (tokens, 1, rotary_dim)


class RotaryEmbedding:
    """Rotates pairs of dimensions of each head by angles that grow with the position.

    Cosines and sines are computed in float32, cached, and grown by doubling for longer sequences. Source:
    arXiv 2104.09864; pairs are (i, i + rotary_dim / 2).
    """

    def __init__(self, rope: RopeSpec, device: torch.device) -> None:
        frequencies = rope_frequencies(rope)
        self.rotary_dim = rope.rotary_dim
        self.attention_factor = frequencies.attention_factor
        self.inv_freq = torch.from_numpy(frequencies.inv_freq).to(device)
        self._cos = self._sin = torch.empty(0, rope.rotary_dim // 2, device=device)

    def tables(self, position_ids: torch.Tensor, num_positions: int, dtype: torch.dtype) -> RotaryTables:
        """Look up the positions (tokens,) of a step, all below `num_positions`."""
        if num_positions > len(self._cos):
            self._grow(num_positions)
        cos = self._cos.index_select(0, position_ids).to(dtype)  # (tokens, rotary_dim / 2)
        sin = self._sin.index_select(0, position_ids).to(dtype)
        return RotaryTables(torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1))

    def apply(self, heads: torch.Tensor, tables: RotaryTables) -> torch.Tensor:
        """Rotate (tokens, heads, dim)."""
        swapped = torch.roll(heads, self.rotary_dim // 2, dims=-1)
        return torch.addcmul(heads * tables.cos, swapped, tables.sin)

    def _grow(self, num_positions: int) -> None:
        rows = _MIN_ROWS
        while rows < num_positions:
            rows *= 2
        positions = torch.arange(rows, device=self.inv_freq.device, dtype=torch.float32)
        angles = positions[:, None] * self.inv_freq  # (rows, rotary_dim / 2)
        self._cos = angles.cos() * self.attention_factor
        self._sin = angles.sin() * self.attention_factor
