"""Products with matrices of codes and scales, in bounded memory."""

from __future__ import annotations

import torch

from sagellm.accel.row_padding import num_padded, padded_linear
from sagellm.accel.slices import row_slices
from sagellm.accel.widening import widening_for
from sagellm.core import QuantizationGranularity, QuantizationOutput

_HAS_PACKED_KERNEL = hasattr(torch.ops.aten, "_weight_int8pack_mm")
_PACKED_MAX_TOKENS = 6  # above that, expanding the weights once costs less than the slower product
_PACKED_MULTIPLE = 16  # the kernel reads 16 columns at a time, even past the end of a row


def of_rows(scales: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return the scales, or zeros, of some rows; a single one applies to all."""
    return scales if scales.shape[0] == 1 else scales[start:stop]


def expand(output: QuantizationOutput, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
    """Return rows `[start, stop)` as (value - zero) · scale in float32, rounded once to `dtype`."""
    values = output.values[start:stop]
    scales = of_rows(output.scales, start, stop)
    grouped = values.reshape(values.shape[0], scales.shape[1], -1).to(torch.float32)
    if output.zeros is not None:
        grouped.sub_(of_rows(output.zeros, start, stop).unsqueeze(-1))
    return grouped.mul_(scales.unsqueeze(-1)).reshape(values.shape).to(dtype)


def fits_kernel(x: torch.Tensor, output: QuantizationOutput) -> bool:
    """Say whether torch's int8 kernel is both right and faster here.

    In float16 and float32 the kernel is a plain loop, and in bfloat16 it reads beyond rows whose
    length is not a multiple of 16.
    """
    return (
        x.dtype is torch.bfloat16
        and x.shape[0] <= _PACKED_MAX_TOKENS
        and x.device.type == "cpu"
        and output.config.granularity is QuantizationGranularity.PER_CHANNEL
        and output.values.dtype is torch.int8
        and output.zeros is None
        and x.shape[1] % _PACKED_MULTIPLE == 0
        and _HAS_PACKED_KERNEL
    )


def packed_product(x: torch.Tensor, output: QuantizationOutput) -> torch.Tensor:
    """Return x @ weight.T by torch's int8 kernel; ask `fits_kernel` first."""
    scales = output.scales.view(-1).to(torch.bfloat16)  # exact
    product: torch.Tensor = torch.ops.aten._weight_int8pack_mm(x.contiguous(), output.values, scales)
    return product


def sliced_product(x: torch.Tensor, output: QuantizationOutput) -> torch.Tensor:
    """Return x @ weight.T, expanding a bounded number of weights at a time. On any device.

    They are expanded to x's dtype, or to float32 on a CPU that multiplies it faster.
    """
    num_tokens, num_columns = x.shape
    num_rows = output.values.shape[0]
    product = x.new_empty(num_tokens, num_rows)
    if widening_for(x.dtype, x.device).takes(num_tokens):
        x = x.float()
    # A row's scale can be applied after the product, except in float16, where unscaled sums overflow.
    is_late = output.scales.shape[1] == 1 and x.dtype is not torch.float16
    # codes → x's dtype, or by way of float32; and the slice's product before it is stored
    bytes_per_row = num_columns * (x.itemsize if is_late else 4 + x.itemsize)
    bytes_per_row += 2 * num_padded(num_tokens) * x.itemsize
    for start, stop in row_slices(num_rows, bytes_per_row, x.device):
        if is_late:
            part = padded_linear(x, _numbers(output, start, stop, x.dtype))
            part = part.mul_(of_rows(output.scales, start, stop).T)
        else:
            part = padded_linear(x, expand(output, start, stop, x.dtype))
        product[:, start:stop] = part
    return product


def _numbers(output: QuantizationOutput, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
    """Return value - zero of rows with a zero each; exact in bfloat16 too, as both have 8 bits."""
    numbers = output.values[start:stop].to(dtype)
    return numbers if output.zeros is None else numbers.sub_(of_rows(output.zeros, start, stop))
