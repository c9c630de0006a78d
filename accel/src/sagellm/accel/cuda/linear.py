"""Products in FP8, by cuBLAS."""

from __future__ import annotations

import torch

from sagellm.accel.cuda.layer_ops import round_to_fp8
from sagellm.accel.linear import LinearContext, PlainLinear
from sagellm.core import Shard, UnsupportedModelError
from sagellm.core.protocols.model_spec import FusedLinear

_FP8 = torch.float8_e4m3fn
_ALIGNMENT = 16
"""Numbers of inputs and outputs that `torch._scaled_mm` takes are multiples of this."""


class FP8Linear(PlainLinear):
    """The weight in float8_e4m3fn with a scale per output; rows of the input get one each, when they come."""

    def create(self, linear: FusedLinear, shard: Shard, dtype: torch.dtype) -> None:
        """Allocate the weight as it is read. Raises UnsupportedModelError for sizes that do not align."""
        if any(size % _ALIGNMENT for size in linear.shape):
            raise UnsupportedModelError(
                f"linears in FP8 need multiples of {_ALIGNMENT} inputs and outputs; "
                f"{linear.parts[0].weight.name} and what is beside it are {linear.shape}"
            )
        super().create(linear, shard, dtype)

    def apply(self, x: torch.Tensor, ctx: LinearContext) -> torch.Tensor:
        """Round the rows, multiply, and scale the product."""
        rows, scales = round_to_fp8(x)
        out = torch._scaled_mm(rows, self._rounded.t(), scales, self._scales, out_dtype=x.dtype)
        return out if self._bias is None else out + self._bias

    def _finish(self) -> None:
        weight = self._weight.float()
        del self._weight
        scales = weight.abs().amax(1, keepdim=True).clamp(min=1e-20) / 448
        self._rounded = (weight / scales).to(_FP8)
        self._scales = scales.t().contiguous()  # (1, out)
        self._weigh(self._rounded.numel(), self._rounded.nbytes + self._scales.nbytes)
