"""What quantizers to codes with scales have in common; activations stay as they are."""

from __future__ import annotations

import threading
from abc import abstractmethod
from typing import ClassVar, NamedTuple

import torch

from sagellm.accel.code_products import expand, fits_kernel, of_rows, packed_product, sliced_product
from sagellm.accel.slices import row_slices
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
from sagellm.core.protocols.weight_form import CodeType, WeightForm

_logger = get_logger(__name__)

SMALLEST_SCALE = torch.finfo(torch.float32).tiny


class Steps(NamedTuple):
    """The scales of a matrix, (out, groups), or (1, 1) for all of it, in float32, and its zeros or None."""

    scales: torch.Tensor
    zeros: torch.Tensor | None = None

    def of_rows(self, start: int, stop: int) -> Steps:
        """Return those of some rows, with a dimension for the columns of a group."""
        scales = of_rows(self.scales, start, stop).unsqueeze(-1)
        zeros = None if self.zeros is None else of_rows(self.zeros, start, stop).unsqueeze(-1)
        return Steps(scales, zeros)


class ScaledQuantizer(QuantizerProtocol):
    """Rounds weights to codes: value = nearest(w ÷ scale + zero), weight = (value - zero) · scale.

    A scale is kept in float32 and rounded up to 8 significant bits. The product of value and
    scale is then exact in float32, and the scale loses nothing if a kernel needs it in bfloat16.
    Rows of zeros get the smallest possible scale and come back as zeros. `quantize` and `linear`
    use at most 32 MiB of temporary memory besides their result (or one row, if that is
    larger). Thread-safe.
    """

    code: ClassVar[CodeType]
    value_dtype: ClassVar[torch.dtype]

    def __init__(self, config: QuantizationConfig | None = None) -> None:
        self._config = config or self.default_config
        self._metrics = QuantizerMetrics()
        self._lock = threading.Lock()

    @abstractmethod
    def _steps(self, weight: torch.Tensor, num_groups: int) -> Steps:
        """Return the scales and zeros to round a weight by."""

    @abstractmethod
    def _nearest(self, quotients: torch.Tensor, steps: Steps) -> torch.Tensor:
        """Return the values for some w ÷ scale (rows, groups, columns of a group), as new numbers."""

    @torch.no_grad()
    def quantize(self, weight: torch.Tensor) -> QuantizationOutput:
        """Quantize a matrix (out, in) into values of the same shape, on the same device."""
        config = self.config_for(weight)
        check_weight_shape(weight, config)
        num_rows, num_columns = weight.shape
        is_grouped = config.granularity is QuantizationGranularity.PER_GROUP
        steps = self._steps(weight, num_columns // config.group_size if is_grouped else 1)
        values = torch.empty_like(weight, dtype=self.value_dtype, memory_format=torch.contiguous_format)
        max_error = 0.0
        for start, stop in row_slices(num_rows, num_columns * 12, weight.device):
            error = self._fill(values[start:stop], weight[start:stop], steps.of_rows(start, stop))
            max_error = max(max_error, error)
        output = QuantizationOutput(values=values, scales=steps.scales, zeros=steps.zeros, config=config)
        self.count(weight.nbytes, output.num_bytes, max_error)
        _logger.debug("quantized %d × %d weights, error up to %.3f steps", num_rows, num_columns, max_error)
        return output

    @torch.no_grad()
    def dequantize(self, output: QuantizationOutput, dtype: torch.dtype) -> torch.Tensor:
        """Return (value - zero) · scale as (out, in).

        Raises InvalidInputError for an output not made by this quantizer: values of another type or that
        are not finite, scales that are not two-dimensional, do not fit, or are not positive, zeros unlike
        them.
        """
        self._check_output(output)
        matrix = torch.empty_like(output.values, dtype=dtype)
        for start, stop in row_slices(matrix.shape[0], matrix.shape[1] * 8, matrix.device):
            rows = expand(output, start, stop, torch.float32)
            if self.value_dtype.is_floating_point and not bool(rows.isfinite().all()):
                raise InvalidInputError(
                    f"row {start + _first_row_not_finite(rows)} has a value that is NaN or infinite; "
                    "quantize the weight again"
                )
            matrix[start:stop] = rows
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

    def count(self, original_bytes: int, quantized_bytes: int, max_error: float) -> None:
        """Count a weight that was quantized; `max_error` is its largest error in steps."""
        with self._lock:
            metrics = self._metrics
            metrics.num_tensors += 1
            metrics.original_bytes += original_bytes
            metrics.quantized_bytes += quantized_bytes
            metrics.max_error_steps = max(metrics.max_error_steps, max_error)

    def config_for(self, weight: torch.Tensor) -> QuantizationConfig:
        """Return how this weight is to be quantized."""
        del weight
        return self._config

    def weight_form(self, num_inputs: int) -> WeightForm | None:
        """Return the form of this code, with scales for each output (or all), or for each group."""
        return WeightForm(code=self.code, group_size=self._group_size(num_inputs))

    def _group_size(self, num_inputs: int) -> int:
        """Return how many inputs share a scale; 0: all of an output."""
        row = torch.empty(1, num_inputs, device="meta")
        config = self.config_for(row)
        check_weight_shape(row, config)
        return config.group_size if config.granularity is QuantizationGranularity.PER_GROUP else 0

    def _ranges(self, weight: torch.Tensor, num_groups: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the least and the largest weight of each group, (out, groups), or (1, 1) for the tensor.

        Raises InvalidInputError for NaN and infinities, with the row.
        """
        num_rows, num_columns = weight.shape
        ends = torch.empty(2, num_rows, num_groups, dtype=torch.float32, device=weight.device)
        for start, stop in row_slices(num_rows, num_columns * 4, weight.device):
            grouped = weight[start:stop].to(torch.float32).reshape(stop - start, num_groups, -1)
            ends[0, start:stop], ends[1, start:stop] = torch.aminmax(grouped, dim=-1)  # NaN stays NaN
        if not bool(ends.isfinite().all()):
            row = _first_row_not_finite(ends.abs().amax(0))
            raise InvalidInputError(
                f"row {row} of the weight holds NaN, an infinite value or one beyond float32's range; "
                "repair the checkpoint, or leave this weight unquantized"
            )
        if self._config.granularity is QuantizationGranularity.PER_TENSOR:
            return ends[0].min().reshape(1, 1), ends[1].max().reshape(1, 1)
        return ends[0], ends[1]

    def _symmetric_scales(self, weight: torch.Tensor, num_groups: int, largest_value: int) -> torch.Tensor:
        """Return clip_ratio · max|w| ÷ the largest value."""
        low, high = self._ranges(weight, num_groups)
        largest = torch.maximum(-low, high)
        return round_up(largest.mul_(self._config.clip_ratio / largest_value).clamp_(min=SMALLEST_SCALE))

    def _fill(self, values: torch.Tensor, rows: torch.Tensor, steps: Steps) -> float:
        """Write the values of some rows into `values` and return the largest error in steps."""
        grouped = rows.to(torch.float32).reshape(rows.shape[0], steps.scales.shape[1], -1)
        quotients = grouped / steps.scales  # (rows, groups, columns of a group)
        nearest = self._nearest(quotients, steps)
        values.copy_(nearest.view_as(values))
        numbers = nearest.to(torch.float32)
        if steps.zeros is not None:
            numbers = numbers.sub_(steps.zeros)
        return float(quotients.sub_(numbers).abs_().max())

    def _check_output(self, output: QuantizationOutput) -> None:
        values, scales, zeros = output.values, output.scales, output.zeros
        if values.dtype != self.value_dtype or values.dim() != 2:
            raise InvalidInputError(
                f"the values are {values.dtype} of shape {tuple(values.shape)}; they must be "
                f"{self.value_dtype} of (out, in)"
            )
        fits = scales.dim() == 2 and scales.shape[0] in (1, values.shape[0]) and scales.shape[1] > 0
        if not fits or values.shape[1] % scales.shape[1]:
            raise InvalidInputError(
                f"the scales have shape {tuple(scales.shape)}; for values {tuple(values.shape)} they must be "
                "(1, 1), (out, 1) or (out, in ÷ group_size)"
            )
        if not bool(((scales > 0) & scales.isfinite()).all()):
            raise InvalidInputError("a scale is zero, negative, NaN or infinite; quantize the weight again")
        if zeros is not None and (zeros.dtype != torch.int8 or zeros.shape != scales.shape):
            raise InvalidInputError(
                f"the zeros are {zeros.dtype} of shape {tuple(zeros.shape)}; they must be int8 of "
                f"{tuple(scales.shape)}, as the scales"
            )


def round_up(scales: torch.Tensor) -> torch.Tensor:
    """Round positive float32 up to the next number with 8 significant bits."""
    bits = scales.contiguous().view(torch.int32)
    return ((bits + 0xFFFF) & ~0xFFFF).view(torch.float32)


def _first_row_not_finite(rows: torch.Tensor) -> int:
    return int((~rows.isfinite()).any(dim=1).nonzero()[0])
