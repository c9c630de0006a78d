"""Weights as integers with scales; activations stay as they are."""

from __future__ import annotations

import threading
from typing import ClassVar

import torch

from sagellm.accel.row_padding import num_padded, padded_linear
from sagellm.accel.slices import row_slices
from sagellm.accel.widening import widening_for
from sagellm.core import (
    InvalidInputError,
    QuantizationConfig,
    QuantizationGranularity,
    QuantizationOutput,
    QuantizerMetrics,
    QuantizerProtocol,
    check_weight_shape,
    get_logger,
)
from sagellm.core.protocols.quantizer import IntegerForm

_HAS_PACKED_KERNEL = hasattr(torch.ops.aten, "_weight_int8pack_mm")
_PACKED_MAX_TOKENS = 6  # above that, expanding the weights once costs less than the slower product
_PACKED_MULTIPLE = 16  # the kernel reads 16 columns at a time, even past the end of a row


def scale_rows(scales: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return the scales of some rows; a single scale applies to all."""
    return scales if scales.shape[0] == 1 else scales[start:stop]


def expand(output: QuantizationOutput, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
    """Return rows `[start, stop)` as value · scale, multiplied in float32 and rounded once to `dtype`."""
    values = output.values[start:stop]
    scales = scale_rows(output.scales, start, stop)
    grouped = values.reshape(values.shape[0], scales.shape[1], -1).to(torch.float32)
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
    # int8 → x's dtype, or by way of float32; and the slice's product before it is stored
    bytes_per_row = num_columns * (x.itemsize if is_late else 4 + x.itemsize)
    bytes_per_row += 2 * num_padded(num_tokens) * x.itemsize
    for start, stop in row_slices(num_rows, bytes_per_row, x.device):
        if is_late:
            part = padded_linear(x, output.values[start:stop].to(x.dtype))
            part = part.mul_(scale_rows(output.scales, start, stop).T)
        else:
            part = padded_linear(x, expand(output, start, stop, x.dtype))
        product[:, start:stop] = part
    return product


_logger = get_logger(__name__)

_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


class IntegerQuantizer(QuantizerProtocol):
    """Rounds weights to integers: value = round(w ÷ scale), within `lowest` … `highest`.

    A scale is kept in float32 and rounded up to 8 significant bits. The product of value and
    scale is then exact in float32, and the scale loses nothing if a kernel needs it in bfloat16.
    Rows of zeros get the smallest possible scale and come back as zeros. `quantize` and `linear`
    use at most 32 MiB of temporary memory besides their result (or one row, if that is
    larger). Thread-safe.
    """

    lowest: ClassVar[int]
    highest: ClassVar[int]

    def __init__(self, config: QuantizationConfig | None = None) -> None:
        self._config = config or self.default_config
        self._metrics = QuantizerMetrics()
        self._lock = threading.Lock()

    @torch.no_grad()
    def quantize(self, weight: torch.Tensor) -> QuantizationOutput:
        """Quantize a matrix (out, in) into int8 values of the same shape, on the same device."""
        config = self.config_for(weight)
        check_weight_shape(weight, config)
        num_rows, num_columns = weight.shape
        is_grouped = config.granularity is QuantizationGranularity.PER_GROUP
        num_groups = num_columns // config.group_size if is_grouped else 1
        scales = self._scales(weight, num_groups)
        values = torch.empty_like(weight, dtype=torch.int8, memory_format=torch.contiguous_format)
        max_error = 0.0
        for start, stop in row_slices(num_rows, num_columns * 12, weight.device):
            error = self._fill(values[start:stop], weight[start:stop], scale_rows(scales, start, stop))
            max_error = max(max_error, error)
        output = QuantizationOutput(values=values, scales=scales, config=config)
        self.count(weight.nbytes, output.num_bytes, max_error)
        _logger.debug("quantized %d × %d weights, error up to %.3f steps", num_rows, num_columns, max_error)
        return output

    @torch.no_grad()
    def dequantize(self, output: QuantizationOutput, dtype: torch.dtype) -> torch.Tensor:
        """Return value · scale as (out, in).

        Raises InvalidInputError for an output not made by this quantizer: values
        that are not int8, or scales that are not two-dimensional, do not fit, or are not positive.
        """
        _check_output(output)
        matrix = torch.empty_like(output.values, dtype=dtype)
        for start, stop in row_slices(matrix.shape[0], matrix.shape[1] * 8, matrix.device):
            matrix[start:stop] = expand(output, start, stop, torch.float32)
        return matrix

    @torch.no_grad()
    def linear(
        self, x: torch.Tensor, output: QuantizationOutput, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return `x @ weight.T + bias` in x's dtype; x is (tokens, in).

        A few rows of bfloat16 on a CPU go through torch's int8 kernel, which reads one byte per
        weight. Otherwise the weights are expanded a slice at a time, and multiplied slice by slice.
        """
        if x.dim() != 2 or x.shape[1] != output.values.shape[1]:
            raise InvalidInputError(
                f"x has shape {tuple(x.shape)}; the weight {tuple(output.values.shape)} takes "
                f"(tokens, {output.values.shape[1]})"
            )
        product = packed_product(x, output) if fits_kernel(x, output) else sliced_product(x, output)
        return product if bias is None else product.add_(bias.to(product.dtype))

    def metrics(self) -> QuantizerMetrics:
        """Return the counts so far."""
        with self._lock:
            return QuantizerMetrics(**vars(self._metrics))

    def config_for(self, weight: torch.Tensor) -> QuantizationConfig:
        """Return how this weight is to be quantized."""
        del weight
        return self._config

    def _scales(self, weight: torch.Tensor, num_groups: int) -> torch.Tensor:
        """Return scales (out, groups), or (1, 1) for the whole tensor, in float32."""
        num_rows, num_columns = weight.shape
        largest = torch.empty(num_rows, num_groups, dtype=torch.float32, device=weight.device)
        for start, stop in row_slices(num_rows, num_columns * 4, weight.device):
            largest[start:stop] = _largest(weight[start:stop], num_groups)
        if not bool(largest.isfinite().all()):
            row = int((~largest.isfinite()).any(dim=1).nonzero()[0])
            raise InvalidInputError(
                f"row {row} of the weight holds NaN, an infinite value or one beyond float32's range; "
                "repair the checkpoint, or leave this weight unquantized"
            )
        if self._config.granularity is QuantizationGranularity.PER_TENSOR:
            largest = largest.max().reshape(1, 1)
        scales = largest * (float(self._config.clip_ratio) / self.highest)
        return round_up(scales.clamp_(min=_SMALLEST_SCALE))

    def _fill(self, values: torch.Tensor, rows: torch.Tensor, scales: torch.Tensor) -> float:
        """Write the codes of some rows into `values` and return the largest error in steps."""
        grouped = rows.to(torch.float32).reshape(rows.shape[0], scales.shape[1], -1)
        quotient = grouped / scales.unsqueeze(-1)  # (rows, groups, columns of a group)
        code = quotient.round().clamp_(self.lowest, self.highest)
        values.copy_(code.view_as(values))
        return float(quotient.sub_(code).abs_().max())

    def count(self, original_bytes: int, quantized_bytes: int, max_error: float) -> None:
        """Count a weight that was quantized; `max_error` is its largest error in steps."""
        with self._lock:
            metrics = self._metrics
            metrics.num_tensors += 1
            metrics.original_bytes += original_bytes
            metrics.quantized_bytes += quantized_bytes
            metrics.max_error_steps = max(metrics.max_error_steps, max_error)


class Int8Quantizer(IntegerQuantizer):
    """Rounds weights to 255 levels, scale = clip_ratio · max|w| ÷ 127; one scale per row by default."""

    lowest, highest = -127, 127  # without -128, so that negating a weight negates its code

    def integer_form(self, num_inputs: int) -> IntegerForm | None:
        """Return the form with a scale for each output; None of others and of derived classes."""
        is_known = type(self) is Int8Quantizer
        if not is_known or self._config.granularity is not QuantizationGranularity.PER_CHANNEL:
            return None
        return IntegerForm(bits=8, clip_ratio=self._config.clip_ratio)


def _largest(rows: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Return max|w| by row and group in float32; NaN if there is one among them."""
    grouped = rows.to(torch.float32).reshape(rows.shape[0], num_groups, -1)
    low, high = torch.aminmax(grouped, dim=-1)
    return torch.maximum(-low, high)


def round_up(scales: torch.Tensor) -> torch.Tensor:
    """Round positive float32 up to the next number with 8 significant bits."""
    bits = scales.contiguous().view(torch.int32)
    return ((bits + 0xFFFF) & ~0xFFFF).view(torch.float32)


def _check_output(output: QuantizationOutput) -> None:
    values, scales = output.values, output.scales
    if values.dtype != torch.int8 or values.dim() != 2:
        raise InvalidInputError(
            f"the values are {values.dtype} of shape {tuple(values.shape)}; they must be int8 of (out, in)"
        )
    fits = scales.dim() == 2 and scales.shape[0] in (1, values.shape[0]) and scales.shape[1] > 0
    if not fits or values.shape[1] % scales.shape[1]:
        raise InvalidInputError(
            f"the scales have shape {tuple(scales.shape)}; for values {tuple(values.shape)} they must be "
            "(1, 1), (out, 1) or (out, in ÷ group_size)"
        )
    if not bool(((scales > 0) & scales.isfinite()).all()):
        raise InvalidInputError("a scale is zero, negative, NaN or infinite; quantize the weight again")
