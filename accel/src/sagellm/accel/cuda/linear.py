"""Products with weights on the device: by cuBLAS as they are, or in FP8."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch.nn import functional

from sagellm.accel.cuda.layer_ops import round_to_fp8

_FP8 = torch.float8_e4m3fn
FP8_ALIGNMENT = 16
"""Numbers of inputs and outputs that `torch._scaled_mm` takes are multiples of this."""


class Linear(ABC):
    """Multiplies rows by a matrix."""

    @abstractmethod
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x @ weight.T + bias`, (rows, out) for (rows, in)."""

    @abstractmethod
    def weigh(self) -> tuple[int, int]:
        """Return the number of parameters and their bytes as stored."""


class PlainLinear(Linear):
    """The weight as the model has it, (out, in)."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        return functional.linear(x, self._weight, self._bias)

    def weigh(self) -> tuple[int, int]:
        """Return the size of weight and bias."""
        return _weigh(self._weight, self._bias)


class FP8Linear(Linear):
    """The weight in float8_e4m3fn with a scale per output; rows of the input get one each, when they come."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        scales = weight.float().abs().amax(1, keepdim=True).clamp(min=1e-20) / 448
        self._weight = (weight.float() / scales).to(_FP8)
        self._scales = scales.t().contiguous()  # (1, out)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Round the rows, multiply, and scale the product."""
        rows, scales = round_to_fp8(x)
        out = torch._scaled_mm(rows, self._weight.t(), scales, self._scales, out_dtype=x.dtype)
        return out if self._bias is None else out + self._bias

    def weigh(self) -> tuple[int, int]:
        """Return the size of weight, scales and bias."""
        num_parameters, num_bytes = _weigh(self._weight, self._bias)
        return num_parameters, num_bytes + self._scales.nbytes


def _weigh(weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[int, int]:
    both = [weight] if bias is None else [weight, bias]
    return sum(each.numel() for each in both), sum(each.nbytes for each in both)
