"""How linear layers store their weights and multiply by them: the only place that knows a format."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Self

import torch

from sagellm.accel.row_padding import padded_linear
from sagellm.accel.weights import WeightReader
from sagellm.accel.widening import can_pack, packed_linear, widened_product, widening_for
from sagellm.core import WHOLE, ModelMetrics, QuantizerProtocol, Shard, SparsifierProtocol
from sagellm.core.protocols.model_spec import FusedLinear, LinearPart


class WideRows:
    """Chooses the rows of a step that are multiplied widened: those of sequences that compute many tokens.

    Only a sequence's own tokens decide, not the rest of the batch.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._widening = widening_for(dtype, device)
        self._num_rows = 0  # in the step, if some are wide
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


class LinearContext(NamedTuple):
    """What linear layers know about a step. All layers of a model share one object."""

    wide_rows: WideRows


class Product(ABC):
    """A loaded linear layer."""

    @abstractmethod
    def apply(self, x: torch.Tensor, ctx: LinearContext) -> torch.Tensor:
        """Return (tokens, out) for (tokens, in)."""

    @abstractmethod
    def metrics(self) -> ModelMetrics:
        """Return the size of the loaded weights."""


class ProductsSideBySide(Product):
    """Products of one input that no pass has joined, or that are stored in different forms."""

    def __init__(self, products: Sequence[Product]) -> None:
        self._products = tuple(products)

    def apply(self, x: torch.Tensor, ctx: LinearContext) -> torch.Tensor:
        """Multiply by each and put the products together."""
        return torch.cat([product.apply(x, ctx) for product in self._products], dim=1)

    def metrics(self) -> ModelMetrics:
        """Return the size of all of them."""
        sizes = [product.metrics() for product in self._products]
        return ModelMetrics(
            num_parameters=sum(size.num_parameters for size in sizes),
            weight_bytes=sum(size.weight_bytes for size in sizes),
        )


class LinearMethod(Product):
    """How one linear layer stores and multiplies its weights.

    `create` is called once, then `load` once per part, and `apply` in every step. A method may wrap another
    one and use its product: an adapter adds to it, a shard sums it over ranks.
    """

    multiplies_in: torch.dtype | None = None
    """The number format of the factors; None: the model's."""

    @abstractmethod
    def create(self, linear: FusedLinear, shard: Shard, dtype: torch.dtype) -> None:
        """Prepare for parts whose outputs lie side by side, such as query, key and value."""

    @abstractmethod
    def load(self, part: int, weights: WeightReader) -> None:
        """Read one of the parts."""


class PlainLinear(LinearMethod):
    """`x @ weight.T + bias`, widened for the rows that the context names."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def adopt(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Self:
        """Use weights that are already in memory, instead of `create` and `load`."""
        self._weight, self._bias = weight, bias
        self._finish()
        return self

    def create(self, linear: FusedLinear, shard: Shard, dtype: torch.dtype) -> None:
        """Allocate one weight (out, in) and, where the parts have biases, one bias (out,)."""
        assert shard == WHOLE, "the backend refuses shards"
        self._parts, self._num_missing = linear.parts, len(linear.parts)
        self._num_outputs = linear.shape[0]
        self._weight = self._allocate(linear.shape, dtype)
        has_bias = linear.has_bias
        self._bias = torch.zeros(self._num_outputs, dtype=dtype, device=self._device) if has_bias else None

    def load(self, part: int, weights: WeightReader) -> None:
        """Read a part straight into its place."""
        read = self._parts[part]
        weights.load(read.weight, self._weight[read.outputs])
        self._end_part(read, weights)

    def apply(self, x: torch.Tensor, ctx: LinearContext) -> torch.Tensor:
        """Multiply."""
        return ctx.wide_rows.multiply(x, self._weight, self._bias)

    def metrics(self) -> ModelMetrics:
        """Return the size of weight and bias."""
        return self._metrics

    def _end_part(self, read: LinearPart, weights: WeightReader) -> None:
        """Read a part's bias; after the last part, convert the weight."""
        if read.bias is not None and self._bias is not None:
            weights.load(read.bias, self._bias[read.outputs])
        self._num_missing -= 1
        if not self._num_missing:
            self._finish()

    def _allocate(self, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def _finish(self) -> None:
        """Convert the weight to the form in which it is stored."""
        self._weigh(self._weight.numel(), self._weight.nbytes)

    def _weigh(self, num_parameters: int, num_bytes: int) -> None:
        num_biases, bias_bytes = (0, 0) if self._bias is None else (self._bias.numel(), self._bias.nbytes)
        self._metrics = ModelMetrics(
            num_parameters=num_parameters + num_biases, weight_bytes=num_bytes + bias_bytes
        )


class PackedLinear(PlainLinear):
    """The same in bfloat16 on a CPU, with the weight in the order in which oneDNN reads it.

    A product with few rows takes 0.5 to 0.7 of the time (AVX-512 and AMX); memory is the same. All weights
    are read into one shared buffer: separate ones, freed among memory that stays, would leave holes.
    """

    def __init__(self, device: torch.device, staging: Staging) -> None:
        super().__init__(device)
        self._staging = staging

    @staticmethod
    def takes(dtype: torch.dtype, device: torch.device) -> bool:
        """Say whether such weights can be packed on this machine, with this version of torch.

        Also False if widening is faster, since packed weights cannot be widened.
        """
        return device.type == "cpu" and can_pack(dtype) and widening_for(dtype, device).min_rows is None

    def apply(self, x: torch.Tensor, ctx: LinearContext) -> torch.Tensor:
        """Multiply."""
        if not len(x):
            return x.new_empty(0, self._num_outputs)
        return self._multiply(x, self._bias)

    def _allocate(self, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        return self._staging.take(shape, dtype)

    def _finish(self) -> None:
        super()._finish()
        self._multiply = packed_linear(self._weight)
        del self._weight, self._staging


class QuantizedLinear(PlainLinear):
    """The same over a weight held by a quantizer."""

    def __init__(self, device: torch.device, quantizer: QuantizerProtocol) -> None:
        super().__init__(device)
        self._quantizer = quantizer

    def apply(self, x: torch.Tensor, ctx: LinearContext) -> torch.Tensor:
        """Multiply."""
        return self._quantizer.linear(x, self._output, self._bias)

    def _finish(self) -> None:
        self._output = self._quantizer.quantize(self._weight)
        del self._weight
        self._weigh(self._output.values.numel(), self._output.num_bytes)


class SparseLinear(PlainLinear):
    """The same over a pruned weight, by the sparsifier's kernel where it has one for it."""

    def __init__(self, device: torch.device, sparsifier: SparsifierProtocol) -> None:
        super().__init__(device)
        self._sparsifier = sparsifier

    def apply(self, x: torch.Tensor, ctx: LinearContext) -> torch.Tensor:
        """Multiply."""
        return super().apply(x, ctx) if self._kernel is None else self._kernel(x, self._bias)

    def _finish(self) -> None:
        super()._finish()
        self._kernel = self._sparsifier.kernel(self._weight)
        if self._kernel is not None:
            del self._weight


class Staging:
    """Memory for one weight at a time."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def take(self, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor that is valid until the next one is taken."""
        size = math.prod(shape)
        if self._memory.numel() < size or self._memory.dtype != dtype:
            self._memory = torch.empty(size, dtype=dtype)
        return self._memory[:size].view(shape)


def linear_methods(
    dtype: torch.dtype,
    device: torch.device,
    quantizer: QuantizerProtocol | None,
    sparsifier: SparsifierProtocol | None = None,
) -> Callable[[], LinearMethod]:
    """Return the factory of a model's linear layers, whose weights a sparsifier, if any, has pruned."""
    if quantizer is not None:
        return partial(QuantizedLinear, device, quantizer)
    if sparsifier is not None and device.type != "cpu":
        return partial(SparseLinear, device, sparsifier)
    if PackedLinear.takes(dtype, device):
        return partial(PackedLinear, device, Staging())
    return partial(PlainLinear, device)
