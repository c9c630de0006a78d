"""Weights in fewer bits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, ClassVar

from sagellm.core.errors import ConfigError, InvalidInputError

if TYPE_CHECKING:
    import torch

    from sagellm.core.protocols.weight_form import WeightForm


class QuantizationGranularity(Enum):
    """How many weights share one scale."""

    PER_TENSOR = "per_tensor"
    PER_CHANNEL = "per_channel"  # one scale per output row
    PER_GROUP = "per_group"  # one scale per `group_size` neighbours in a row


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """What to quantize to. `clip_ratio` cuts the largest magnitude before a scale is chosen; 1 cuts none."""

    clip_ratio: float = 1.0
    group_size: int = 128
    granularity: QuantizationGranularity = QuantizationGranularity.PER_CHANNEL

    def __post_init__(self) -> None:
        if not isinstance(self.granularity, QuantizationGranularity):
            known = ", ".join(str(granularity) for granularity in QuantizationGranularity)
            raise ConfigError(f"granularity is {self.granularity!r}; it must be one of {known}")
        if not isinstance(self.clip_ratio, int | float) or not 0 < self.clip_ratio <= 1:
            raise ConfigError(f"clip_ratio is {self.clip_ratio!r}; it must be in (0, 1]")
        if isinstance(self.group_size, bool) or not isinstance(self.group_size, int) or self.group_size < 1:
            raise ConfigError(
                f"group_size is {self.group_size!r}; it must be an integer of at least 1 "
                f"(it is used by {QuantizationGranularity.PER_GROUP} alone)"
            )


@dataclass(frozen=True, kw_only=True)
class QuantizationOutput:
    """A quantized matrix (values - zeros) · scales: values (out, in), the others a number for each group.

    `scales` has shape (1, 1), (out, 1) or (out, in ÷ group_size), always two-dimensional; `zeros` has the
    same, and None stands for zeros of 0. The product is taken in float32. Values are of an integer type, or
    of a floating-point one such as float8_e4m3fn.
    """

    values: torch.Tensor
    scales: torch.Tensor
    config: QuantizationConfig
    zeros: torch.Tensor | None = None  # int8, in the values' unit

    @property
    def num_bytes(self) -> int:
        """Bytes of values, scales and zeros together."""
        return self.values.nbytes + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)


@dataclass(frozen=True, kw_only=True)
class IntegerForm:
    """Symmetric integers, value = round(w ÷ scale), for kernels that quantize and pack weights themselves.

    8 bits are -127 … 127 and 4 bits -8 … 7; scale = clip_ratio · max|w| ÷ 127 or 7, rounded up to 8
    significant bits, or what `searches_scales` finds (`Int4Quantizer`).
    """

    bits: int
    group_size: int = 0  # inputs that share a scale; 0: all of an output
    clip_ratio: float = 1.0
    searches_scales: bool = False


@dataclass(kw_only=True)
class QuantizerMetrics:
    """Counts of what has been quantized so far."""

    num_tensors: int = 0
    original_bytes: int = 0
    quantized_bytes: int = 0
    max_error_steps: float = 0.0  # largest |w - dequantized| ÷ its scale; of integers 0.5 unless clipped


def check_weight_shape(weight: torch.Tensor, config: QuantizationConfig) -> None:
    """Raise InvalidInputError unless a weight is a matrix of floats that divides into the config's groups."""
    if not weight.is_floating_point():
        raise InvalidInputError(f"the weight is of {weight.dtype}; only floating-point weights are quantized")
    shape = tuple(weight.shape)
    if len(shape) != 2:
        raise InvalidInputError(f"the weight has shape {shape}; it must have two dimensions, (out, in)")
    if 0 in shape:
        raise InvalidInputError(f"the weight has shape {shape}; it has no values to quantize")
    remainder = shape[1] % config.group_size
    if config.granularity is QuantizationGranularity.PER_GROUP and remainder:
        padded = shape[1] - remainder + config.group_size
        raise InvalidInputError(
            f"the weight has {shape[1]} columns, which do not divide into groups of {config.group_size}; "
            f"pad them to {padded}, a multiple of {config.group_size}, or choose a group_size that divides "
            f"{shape[1]}"
        )


class QuantizerProtocol(ABC):
    """Quantizes the weights of linear layers and multiplies by them.

    Providers are called as `factory(config)` with a QuantizationConfig, or None for `default_config`.
    The engine calls `quantize` once for each linear weight while it loads, drops the original,
    and calls `linear` in every step.
    """

    default_config: ClassVar[QuantizationConfig] = QuantizationConfig()
    """What holds where no option says otherwise: the options given replace fields of it."""

    most_error_steps: float = 0.5
    """How far a weight may be from what a round trip makes of it, in scales, with a clip ratio of 1.

    More than half of one where scales are searched that cut the largest weights.
    """

    most_relative_error: float = 0.0
    """What may come to that as a share of the weight's magnitude, if values are floating-point numbers.

    Half of their smallest positive number is then `most_error_steps`, half of the last place of 1 is this.
    """

    @abstractmethod
    def quantize(self, weight: torch.Tensor) -> QuantizationOutput:
        """Quantize a matrix (out, in).

        Raises InvalidInputError for NaN or infinite values, for a non-float tensor, for a shape
        that is empty or not two-dimensional, and for columns that do not divide into groups (the
        message says to which multiple to pad).
        """

    @abstractmethod
    def dequantize(self, output: QuantizationOutput, dtype: torch.dtype) -> torch.Tensor:
        """Return the matrix that the quantized one represents, (out, in)."""

    @abstractmethod
    def linear(
        self, x: torch.Tensor, output: QuantizationOutput, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return `x @ weight.T + bias` in x's dtype; x is (tokens, in)."""

    def integer_form(self, num_inputs: int) -> IntegerForm | None:
        """Return what a kernel may make of weights by itself, calling `count` for each; None: nothing.

        Raises InvalidInputError for columns that do not divide into groups.
        """
        return None

    def weight_form(self, num_inputs: int) -> WeightForm | None:
        """Return what the values of a weight with so many inputs stand for, as in a checkpoint; None: else.

        Backends choose kernels by it. Raises InvalidInputError for columns that do not divide into groups.
        """
        return None

    def count(self, original_bytes: int, quantized_bytes: int, max_error: float) -> None:  # noqa: B027
        """Count a weight that a kernel has quantized; `max_error` is its largest error in steps."""

    @abstractmethod
    def metrics(self) -> QuantizerMetrics:
        """Return the counts so far."""


class NullQuantizer(QuantizerProtocol):
    """Keeps weights as they are, with scales of one."""

    most_error_steps = 0.0

    def __init__(self, config: QuantizationConfig | None = None) -> None:
        self._config = config or QuantizationConfig()
        self._metrics = QuantizerMetrics()

    def quantize(self, weight: torch.Tensor) -> QuantizationOutput:
        """Keep the matrix, after the checks that the contract requires."""
        check_weight_shape(weight, self._config)
        if not bool(weight.isfinite().all()):
            raise InvalidInputError("the weight holds NaN or infinite values; repair the checkpoint")
        self._metrics.num_tensors += 1
        self._metrics.original_bytes += weight.nbytes
        self._metrics.quantized_bytes += weight.nbytes
        return QuantizationOutput(values=weight, scales=weight.new_ones(1, 1), config=self._config)

    def dequantize(self, output: QuantizationOutput, dtype: torch.dtype) -> torch.Tensor:
        """Return the matrix itself."""
        return output.values.to(dtype)

    def linear(
        self, x: torch.Tensor, output: QuantizationOutput, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiply."""
        product = x @ output.values.to(x.dtype).T
        return product if bias is None else product + bias

    def metrics(self) -> QuantizerMetrics:
        """Return the counts so far."""
        return self._metrics
