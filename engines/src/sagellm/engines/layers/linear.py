"""Linear layers over plain and over quantized weights."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional

from sagellm.core import QuantizationOutput, QuantizerProtocol


class LinearLayer(Protocol):
    """What a decoder multiplies with."""

    num_parameters: int
    weight_bytes: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return (tokens, out) for (tokens, in)."""


class Linear:
    """`x @ weight.T + bias`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight  # (out, in)
        self.bias = bias
        self.num_parameters = weight.numel() + (0 if bias is None else bias.numel())
        self.weight_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        return functional.linear(x, self.weight, self.bias)


class QuantizedLinear:
    """The same over a weight that a quantizer holds."""

    def __init__(
        self, quantizer: QuantizerProtocol, output: QuantizationOutput, bias: torch.Tensor | None = None
    ) -> None:
        self._quantizer = quantizer
        self._output = output
        self.bias = bias
        self.num_parameters = output.values.numel() + (0 if bias is None else bias.numel())
        self.weight_bytes = output.num_bytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        return self._quantizer.linear(x, self._output, self.bias)


def make_linear(
    weight: torch.Tensor, bias: torch.Tensor | None, quantizer: QuantizerProtocol | None
) -> LinearLayer:
    """Make the layer that a weight (out, in) becomes with this quantizer, or with none."""
    if quantizer is None:
        return Linear(weight, bias)
    return QuantizedLinear(quantizer, quantizer.quantize(weight), bias)
