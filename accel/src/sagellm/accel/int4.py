"""Weights in 4 bits, in small groups."""

from __future__ import annotations

from dataclasses import replace

import torch

from sagellm.accel.int8 import IntegerQuantizer, round_up, scale_rows
from sagellm.accel.slices import row_slices
from sagellm.core import QuantizationConfig, QuantizationGranularity, check_weight_shape
from sagellm.core.protocols.quantizer import IntegerForm

_GROUP_SIZES = (128, 64, 32, 16, 8, 4, 2, 1)
_SHRINKS = (1.0, 0.93, 0.86, 0.79, 0.72)
"""Factors on the scale that are tried: a few cut weights cost less than coarser steps for all others."""


class Int4Quantizer(IntegerQuantizer):
    """Rounds weights to -8 … 7, scale = clip_ratio · max|w| ÷ 7 × 1 … 0.72; one for groups of 128 by default.

    A group size of 128 becomes the largest smaller power of two that divides a row, if it does not. A value
    takes a byte here; a backend with kernels of its own packs two into one.

    With `search_scales`, the scale of each group (or row, or of the tensor) is multiplied by whichever of 1,
    0.93, 0.86, 0.79 and 0.72 makes Σ (w - scale · value)² smallest: the least mean squared error of Choukroun
    et al. (arXiv 1902.06822), on a grid. It cuts the largest weights by up to 28 %, whatever `clip_ratio` is;
    without it nothing is cut at a clip ratio of 1, and no weight is off by more than half a scale.
    """

    lowest, highest = -8, 7
    default_config = QuantizationConfig(granularity=QuantizationGranularity.PER_GROUP)

    def __init__(self, config: QuantizationConfig | None = None, *, search_scales: bool = True) -> None:
        super().__init__(config)
        self.search_scales = search_scales
        if search_scales:  # of the largest weight; scales are rounded up
            self.most_error_steps = self.highest / _SHRINKS[-1] - self.highest + 0.05

    def config_for(self, weight: torch.Tensor) -> QuantizationConfig:
        """Return the configuration, with groups that divide the rows of this weight if the size is 128."""
        if self._config.group_size != self.default_config.group_size or weight.dim() != 2:
            return self._config
        size = next(size for size in _GROUP_SIZES if weight.shape[1] % size == 0)
        return replace(self._config, group_size=size)

    def integer_form(self, num_inputs: int) -> IntegerForm | None:
        """Return the form with a scale for each group; None of others and of derived classes."""
        if (
            type(self) is not Int4Quantizer
            or self._config.granularity is not QuantizationGranularity.PER_GROUP
        ):
            return None
        row = torch.empty(1, num_inputs, device="meta")
        config = self.config_for(row)
        check_weight_shape(row, config)
        return IntegerForm(
            bits=4,
            group_size=config.group_size,
            clip_ratio=config.clip_ratio,
            searches_scales=self.search_scales,
        )

    def _scales(self, weight: torch.Tensor, num_groups: int) -> torch.Tensor:
        widest = super()._scales(weight, num_groups)
        if not self.search_scales:
            return widest
        best, least = widest, torch.full_like(widest, torch.inf)
        for shrink in _SHRINKS:
            scales = round_up(widest * shrink)
            error = self._squared_error(weight, scales)
            best = torch.where(error < least, scales, best)
            least = torch.minimum(error, least)
        return best

    def _squared_error(self, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Return the squared error of rounding with these scales, added up for each; of their shape."""
        errors = torch.zeros_like(scales)
        for start, stop in row_slices(len(weight), weight.shape[1] * 16, weight.device):
            rows = weight[start:stop].to(torch.float32).reshape(stop - start, scales.shape[1], -1)
            steps = scale_rows(scales, start, stop).unsqueeze(-1)
            code = (rows / steps).round_().clamp_(self.lowest, self.highest)
            error = code.mul_(steps).sub_(rows).square_().sum(-1)  # (rows, groups)
            if len(scales) == 1:  # one scale for all rows, or a single row
                errors += error.sum(0, keepdim=True)
            else:
                errors[start:stop] = error
        return errors
