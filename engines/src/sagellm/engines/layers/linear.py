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


class PackedLinear:
    """The same in bfloat16 on a CPU, with the weight in the order in which oneDNN reads it.

    A product with few rows takes 0.5 to 0.7 of the time (AVX-512 and AMX); memory is the same. The
    weight is copied: the caller may use its memory again.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.num_parameters = weight.numel() + (0 if bias is None else bias.numel())
        self.weight_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self.bias = bias
        self._out_features = len(weight)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._linear = torch.ops.mkldnn._linear_pointwise.default

    @staticmethod
    def takes(dtype: torch.dtype, device: torch.device) -> bool:
        """Say whether such weights can be packed on this machine, with this version of torch."""
        if device.type != "cpu" or dtype != torch.bfloat16:
            return False
        ops = torch.ops.mkldnn
        names = ("_is_mkldnn_bf16_supported", "_reorder_linear_weight", "_linear_pointwise")
        available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        if not available or not all(hasattr(ops, name) for name in names):
            return False
        return bool(ops._is_mkldnn_bf16_supported())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        if not len(x):
            return x.new_empty(0, self._out_features)
        out: torch.Tensor = self._linear(x, self._packed, self.bias, "none", [], "")
        return out


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
        packs = PackedLinear.takes(weight.dtype, weight.device)
        return PackedLinear(weight, bias) if packs else Linear(weight, bias)
    return QuantizedLinear(quantizer, quantizer.quantize(weight), bias)
