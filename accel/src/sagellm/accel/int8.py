"""Weights as integers with scales, and with zeros if they are to be."""

from __future__ import annotations

from typing import ClassVar

import torch

from sagellm.accel.scaled_quantizer import SMALLEST_SCALE, ScaledQuantizer, Steps, round_up
from sagellm.core import QuantizationConfig, QuantizationGranularity
from sagellm.core.protocols.quantizer import IntegerForm
from sagellm.core.protocols.weight_form import CodeType, WeightForm


class IntegerQuantizer(ScaledQuantizer):
    """Rounds weights to integers, half to even.

    Symmetric integers are within `lowest` … `highest`, scale = clip_ratio · max|w| ÷ `highest`. Asymmetric
    ones take all 2ᵇ numbers of b bits for the range of a group's weights and 0, whose ends `clip_ratio` draws
    towards 0: scale = (high - low) ÷ (2ᵇ - 1), and the weight 0 is the number `zero`, exactly.
    """

    lowest: ClassVar[int]
    highest: ClassVar[int]
    value_dtype = torch.int8

    def __init__(self, config: QuantizationConfig | None = None, *, asymmetric: bool = False) -> None:
        super().__init__(config)
        self.asymmetric = asymmetric

    def weight_form(self, num_inputs: int) -> WeightForm | None:
        """Return the form of these integers, with zeros if they are asymmetric."""
        return WeightForm(code=self.code, group_size=self._group_size(num_inputs), has_zeros=self.asymmetric)

    def _steps(self, weight: torch.Tensor, num_groups: int) -> Steps:
        if not self.asymmetric:
            return Steps(self._symmetric_scales(weight, num_groups, self.highest))
        # Each end by itself: the difference of two finite numbers may be infinite.
        least, most = self._bounds
        share = self._config.clip_ratio / (most - least)
        low, high = self._ranges(weight, num_groups)
        low, high = low.clamp(max=0).mul_(share), high.clamp(min=0).mul_(share)
        scales = round_up((high - low).clamp_(min=SMALLEST_SCALE))
        zeros = (least - low / scales * (most - least)).round_().clamp_(least, most)
        return Steps(scales, zeros.to(torch.int8))

    def _nearest(self, quotients: torch.Tensor, steps: Steps) -> torch.Tensor:
        values = quotients.round()
        if steps.zeros is not None:
            values = values.add_(steps.zeros)
        return values.clamp_(*self._bounds)

    @property
    def _bounds(self) -> tuple[int, int]:
        """The least and the largest value."""
        return (-(self.highest + 1), self.highest) if self.asymmetric else (self.lowest, self.highest)


class Int8Quantizer(IntegerQuantizer):
    """Rounds weights to 255 levels, scale = clip_ratio · max|w| ÷ 127; one scale per row by default.

    With `asymmetric` there are 256 levels and a zero beside each scale.
    """

    code = CodeType.INT8
    lowest, highest = -127, 127  # without -128, so that negating a weight negates its code

    def integer_form(self, num_inputs: int) -> IntegerForm | None:
        """Return the symmetric form with a scale for each output; None of others and of derived classes."""
        is_known = type(self) is Int8Quantizer and not self.asymmetric
        if not is_known or self._config.granularity is not QuantizationGranularity.PER_CHANNEL:
            return None
        return IntegerForm(bits=8, clip_ratio=self._config.clip_ratio)
