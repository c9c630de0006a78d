"""Weights in 4 bits, in small groups."""

from __future__ import annotations

from dataclasses import replace

import torch

from sagellm.accel.int8 import IntegerQuantizer, round_up, scale_rows
from sagellm.accel.slices import row_slices
from sagellm.core import QuantizationConfig, QuantizationGranularity

_GROUP_SIZES = (128, 64, 32, 16, 8, 4, 2, 1)
_SHRINKS = (1.0, 0.93, 0.86, 0.79, 0.72)
"""Factors on the scale that are tried: a few cut weights cost less than coarser steps for all others."""


class Int4Quantizer(IntegerQuantizer):
    """Rounds weights to -8 … 7, each group with the scale of the least squared error.

    By default groups have 128 weights, or the largest smaller power of two that divides a row. A
    value takes a byte here; a backend with kernels of its own packs two into one.
    """

    lowest, highest = -8, 7
    most_error_steps = highest / _SHRINKS[-1] - highest + 0.05  # of the largest weight; scales are rounded up

    def __init__(self, config: QuantizationConfig | None = None) -> None:
        super().__init__(config or QuantizationConfig(granularity=QuantizationGranularity.PER_GROUP))
        self._fits_any_row = config is None

    def config_for(self, weight: torch.Tensor) -> QuantizationConfig:
        """Return the configuration, with the group size that fits this weight if none was given."""
        if not self._fits_any_row or weight.dim() != 2:
            return self._config
        size = next(size for size in _GROUP_SIZES if weight.shape[1] % size == 0)
        return replace(self._config, group_size=size)

    def _scales(self, weight: torch.Tensor, num_groups: int) -> torch.Tensor:
        widest = super()._scales(weight, num_groups)
        if self._config.granularity is QuantizationGranularity.PER_TENSOR:
            return widest
        best = torch.empty_like(widest)
        for start, stop in row_slices(len(weight), weight.shape[1] * 16, weight.device):
            rows = weight[start:stop].to(torch.float32).reshape(stop - start, num_groups, -1)
            best[start:stop] = self._least_error(rows, scale_rows(widest, start, stop))
        return best

    def _least_error(self, rows: torch.Tensor, widest: torch.Tensor) -> torch.Tensor:
        """Return scales (rows, groups) with which `rows` (rows, groups, columns) are rounded best."""
        best, least = widest, torch.full_like(widest, torch.inf)
        for shrink in _SHRINKS:
            scales = round_up(widest * shrink)
            code = (rows / scales.unsqueeze(-1)).round_().clamp_(self.lowest, self.highest)
            error = code.mul_(scales.unsqueeze(-1)).sub_(rows).square_().sum(-1)
            best = torch.where(error < least, scales, best)
            least = torch.minimum(error, least)
        return best
