"""Linear layers over plain and over quantized weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from sagellm.accel.row_padding import padded_linear
from sagellm.accel.widening import can_pack, packed_linear, widened_product, widening_for
from sagellm.core import QuantizationOutput, QuantizerProtocol


class LinearLayer(Protocol):
    """What a decoder multiplies with."""

    num_parameters: int
    weight_bytes: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return (tokens, out) for (tokens, in)."""


class WideRows:
    """Which rows of a step are multiplied widened: those of sequences that compute many tokens in it.

    A sequence's own tokens decide, not what else is in the batch. All layers of a model share one object.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._widening = widening_for(dtype, device)
        self._num_rows = 0  # of the step, where some are wide
        self._wide: torch.Tensor | None = None  # their indices; None: all
        self._narrow: torch.Tensor | None = None

    @property
    def is_useful(self) -> bool:
        """Say whether this CPU multiplies any number of rows faster widened."""
        return self._widening.min_rows is not None

    def plan(self, query_lens: Sequence[int]) -> None:
        """Plan a step from the number of tokens that each sequence computes, in the order of rows."""
        self._num_rows = 0
        if not self.is_useful:
            return
        is_wide = [self._widening.takes(num_tokens) for num_tokens in query_lens]
        if any(is_wide):
            self._num_rows = sum(query_lens)
            self._wide = self._narrow = None
            if not all(is_wide):
                rows = torch.tensor(is_wide).repeat_interleave(torch.tensor(query_lens))
                self._wide, self._narrow = rows.nonzero().view(-1), (~rows).nonzero().view(-1)

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x @ weight.T + bias, each row as planned; widens nothing if the rows are not the step's."""
        if not self._num_rows or len(x) != self._num_rows:
            return padded_linear(x, weight, bias)
        if self._wide is None or self._narrow is None:
            return widened_product(x, weight, bias)
        product = x.new_empty(len(x), len(weight))
        product[self._wide] = widened_product(x[self._wide], weight, bias)
        product[self._narrow] = padded_linear(x[self._narrow], weight, bias)
        return product


class Linear:
    """`x @ weight.T + bias`, widened for the rows that `wide_rows` names."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, wide_rows: WideRows | None = None
    ) -> None:
        self.weight = weight  # (out, in)
        self.bias = bias
        self._wide_rows = wide_rows
        self.num_parameters = weight.numel() + (0 if bias is None else bias.numel())
        self.weight_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        if self._wide_rows is not None:
            return self._wide_rows.multiply(x, self.weight, self.bias)
        return padded_linear(x, self.weight, self.bias)


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
        self._multiply = packed_linear(weight)

    @staticmethod
    def takes(dtype: torch.dtype, device: torch.device) -> bool:
        """Say whether such weights can be packed on this machine, with this version of torch.

        False also where widening is faster, since packed weights cannot be widened.
        """
        return device.type == "cpu" and can_pack(dtype) and widening_for(dtype, device).min_rows is None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        if not len(x):
            return x.new_empty(0, self._out_features)
        return self._multiply(x, self.bias)


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
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    quantizer: QuantizerProtocol | None,
    wide_rows: WideRows | None = None,
) -> LinearLayer:
    """Make the layer that a weight (out, in) becomes with this quantizer, or with none."""
    if quantizer is None:
        packs = PackedLinear.takes(weight.dtype, weight.device)
        return PackedLinear(weight, bias) if packs else Linear(weight, bias, wide_rows)
    return QuantizedLinear(quantizer, quantizer.quantize(weight), bias)
