"""The gate of the feed-forward block."""

from __future__ import annotations

import torch
from torch.nn import functional


class SiLUAndMul:
    """`silu(gate) * up`, where gate and up lie side by side in the last dimension."""

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return (tokens, intermediate) for (tokens, 2 * intermediate)."""
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)
