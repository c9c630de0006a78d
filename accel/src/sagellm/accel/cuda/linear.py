"""Products in FP8, by cuBLAS."""

from __future__ import annotations

import torch

from sagellm.accel.cuda.layer_ops import round_to_fp8
from sagellm.accel.linear import LinearContext, QuantizedLinear
from sagellm.core import Shard, UnsupportedModelError
from sagellm.core.protocols.model_spec import FusedLinear

_ALIGNMENT = 16
"""Numbers of inputs and outputs that `torch._scaled_mm` takes are multiples of this."""


class FP8Linear(QuantizedLinear):
    """The weight as `FP8Quantizer` makes it, a scale per output or one for all.

    Rows of the input are rounded too, and get a scale each, when they come.
    """

    multiplies_in = torch.float8_e4m3fn

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
        out = torch._scaled_mm(rows, self._output.values.t(), scales, self._scales, out_dtype=x.dtype)
        return out if self._bias is None else out + self._bias

    def _finish(self) -> None:
        super()._finish()
        output = self._output
        self._scales = output.scales.expand(len(output.values), 1).t().contiguous()  # (1, out)
