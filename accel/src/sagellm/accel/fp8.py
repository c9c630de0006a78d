"""Weights as 8-bit floating-point numbers with scales."""

from __future__ import annotations

import torch

from sagellm.accel.scaled_quantizer import ScaledQuantizer, Steps
from sagellm.core import InvalidInputError, QuantizationOutput
from sagellm.core.protocols.weight_form import CodeType


class FP8Quantizer(ScaledQuantizer):
    """Rounds weights to E4M3, scale = clip_ratio · max|w| ÷ 448; one scale per row by default.

    The nearest number is taken, of two the even one, and the largest for what is beyond it. A weight w comes
    back within |w| ÷ 2⁴, or 2⁻¹⁰ scales if that is more: three bits of fraction, and multiples of 2⁻⁹ below
    the least normal number, 2⁻⁶.
    """

    code = CodeType.FP8_E4M3
    value_dtype = torch.float8_e4m3fn
    most_error_steps = 2.0**-10
    most_relative_error = 2.0**-4

    def _steps(self, weight: torch.Tensor, num_groups: int) -> Steps:
        scales = self._symmetric_scales(weight, num_groups, int(self._largest))
        return Steps(scales.clamp_(max=self._largest_scale))

    def _nearest(self, quotients: torch.Tensor, steps: Steps) -> torch.Tensor:
        # Not all versions of torch saturate when they convert.
        return quotients.clamp(-self._largest, self._largest).to(self.value_dtype)

    def _check_output(self, output: QuantizationOutput) -> None:
        super()._check_output(output)
        if output.zeros is not None:
            raise InvalidInputError("the output has zeros; weights in FP8 have no zeros")

    @property
    def _largest(self) -> float:
        return torch.finfo(self.value_dtype).max

    @property
    def _largest_scale(self) -> float:
        """The largest with 8 bits by which the largest number is finite; larger ones come of rounding up."""
        bits = torch.tensor(torch.finfo(torch.float32).max / self._largest).view(torch.int32) & ~0xFFFF
        return bits.view(torch.float32).item()


class FP8E5M2Quantizer(FP8Quantizer):
    """Rounds weights to E5M2, scale = clip_ratio · max|w| ÷ 57344; one scale per row by default.

    A weight w comes back within |w| ÷ 2³, or 2⁻¹⁷ scales if that is more. E4M3 is twice as fine; this covers
    2³² instead of 2¹⁸ between its smallest and its largest number.
    """

    code = CodeType.FP8_E5M2
    value_dtype = torch.float8_e5m2
    most_error_steps = 2.0**-17
    most_relative_error = 2.0**-3
