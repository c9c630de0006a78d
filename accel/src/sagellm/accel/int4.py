"""Weights in 4 bits, in small groups."""

from __future__ import annotations

from dataclasses import replace

import torch

from sagellm.accel.int8 import IntegerQuantizer
from sagellm.accel.scaled_quantizer import Steps, round_up
from sagellm.accel.slices import row_slices
from sagellm.core import QuantizationConfig, QuantizationGranularity
from sagellm.core.protocols.quantizer import IntegerForm
from sagellm.core.protocols.weight_form import CodeType

_GROUP_SIZES = (128, 64, 32, 16, 8, 4, 2, 1)
_SHRINKS = (1.0, 0.93, 0.86, 0.79, 0.72)
"""Factors on the scale that are tried: a few cut weights cost less than coarser steps for all others."""


class Int4Quantizer(IntegerQuantizer):
    """Rounds weights to -8 … 7, scale = clip_ratio · max|w| ÷ 7 × 1 … 0.72; one for groups of 128 by default.

    A group size of 128 becomes the largest smaller power of two that divides a row, if it does not. A value
    takes a byte here; a backend with kernels of its own packs two into one.

    With `search_scales`, the scale of each group (or row, or of the tensor) is multiplied by whichever of 1,
    0.93, 0.86, 0.79 and 0.72 makes Σ (w - dequantized)² smallest: the least mean squared error of Choukroun
    et al. (arXiv 1902.06822), on a grid. It cuts the largest weights by up to 28 %, whatever `clip_ratio` is;
    without it nothing is cut at a clip ratio of 1, and no weight is off by more than half a scale.

    With `asymmetric` there are 15 steps from the least weight of a group (or 0) to the largest (or 0), and a
    zero beside each scale: better for groups whose weights are not centred, at a byte more for each.
    """

    code = CodeType.INT4
    lowest, highest = -8, 7
    default_config = QuantizationConfig(granularity=QuantizationGranularity.PER_GROUP)

    def __init__(
        self,
        config: QuantizationConfig | None = None,
        *,
        search_scales: bool = True,
        asymmetric: bool = False,
    ) -> None:
        super().__init__(config, asymmetric=asymmetric)
        self.search_scales = search_scales
        if search_scales:  # of the largest weight; scales are rounded up, zeros to integers
            most = self.highest - self.lowest if asymmetric else self.highest
            self.most_error_steps = most / _SHRINKS[-1] - most + (0.55 if asymmetric else 0.05)

    def config_for(self, weight: torch.Tensor) -> QuantizationConfig:
        """Return the configuration, with groups that divide the rows of this weight if the size is 128."""
        if self._config.group_size != self.default_config.group_size or weight.dim() != 2:
            return self._config
        size = next(size for size in _GROUP_SIZES if weight.shape[1] % size == 0)
        return replace(self._config, group_size=size)

    def integer_form(self, num_inputs: int) -> IntegerForm | None:
        """Return the symmetric form with a scale for each group; None of others and of derived classes."""
        is_known = type(self) is Int4Quantizer and not self.asymmetric
        if not is_known or self._config.granularity is not QuantizationGranularity.PER_GROUP:
            return None
        return IntegerForm(
            bits=4,
            group_size=self._group_size(num_inputs),
            clip_ratio=self._config.clip_ratio,
            searches_scales=self.search_scales,
        )

    def _steps(self, weight: torch.Tensor, num_groups: int) -> Steps:
        widest, zeros = steps = super()._steps(weight, num_groups)
        if not self.search_scales:
            return steps
        best, least = widest, torch.full_like(widest, torch.inf)
        for shrink in _SHRINKS:
            scales = round_up(widest * shrink)
            error = self._squared_error(weight, Steps(scales, zeros))
            best = torch.where(error < least, scales, best)
            least = torch.minimum(error, least)
        return Steps(best, zeros)

    def _squared_error(self, weight: torch.Tensor, steps: Steps) -> torch.Tensor:
        """Return the squared error of rounding by these steps, added up for each; of the scales' shape."""
        errors = torch.zeros_like(steps.scales)
        for start, stop in row_slices(len(weight), weight.shape[1] * 16, weight.device):
            rows = weight[start:stop].to(torch.float32).reshape(stop - start, errors.shape[1], -1)
            scales, zeros = by = steps.of_rows(start, stop)
            numbers = self._nearest(rows / scales, by)
            if zeros is not None:
                numbers.sub_(zeros)
            error = numbers.mul_(scales).sub_(rows).square_().sum(-1)  # (rows, groups)
            if len(errors) == 1:  # one scale for all rows, or a single row
                errors += error.sum(0, keepdim=True)
            else:
                errors[start:stop] = error
        return errors
