"""From a checkpoint's tensors to the linears and vectors of one model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sagellm.accel.coded_linear import CodedLinear
from sagellm.accel.linear import LinearMethod, Product, ProductsSideBySide
from sagellm.accel.operations import add_up, linears_by_operation
from sagellm.accel.weights import WeightReader
from sagellm.core import WHOLE, ModelMetrics, TensorSpec
from sagellm.core.protocols.model_spec import DecoderLinears, FusedLinear


class ModelLoader:
    """Reads the tensors of one model to a device, each once, and adds up their sizes."""

    def __init__(
        self,
        weights: WeightReader,
        dtype: torch.dtype,
        device: torch.device,
        method: Callable[[], LinearMethod],
    ) -> None:
        self._weights, self._dtype, self._device, self._method = weights, dtype, device, method
        self._linears: dict[str, LinearMethod] = {}  # by the name of the first part's weight
        self._others: dict[str, torch.Tensor] = {}

    def tensor(self, spec: TensorSpec) -> torch.Tensor:
        """Read a tensor of no linear."""
        tensor = torch.empty(spec.shape, dtype=self._dtype, device=self._device)
        self._others[spec.name] = self._weights.load(spec, tensor)
        return tensor

    def linear(self, linear: FusedLinear, method: LinearMethod | None = None) -> LinearMethod:
        """Read the parts of a linear, into a method of the model's kind if none is given."""
        if method is None:
            method = self._method() if linear.form is None else CodedLinear(self._device)
        method.create(linear, WHOLE, self._dtype)
        for part in range(len(linear.parts)):
            method.load(part, self._weights)
        self._linears[linear.parts[0].weight.name] = method
        return method

    def side_by_side(self, linears: Sequence[FusedLinear]) -> Product:
        """Read linears of one input, whose products lie side by side."""
        products = [self.linear(linear) for linear in linears]
        return products[0] if len(products) == 1 else ProductsSideBySide(products)

    def metrics(self, linears: DecoderLinears) -> ModelMetrics:
        """Return the size of everything that was read: these linears, and other tensors."""
        sizes = {name: linear.metrics() for name, linear in self._linears.items()}
        others = self._others.values()
        return ModelMetrics(
            num_parameters=sum(each.num_parameters for each in sizes.values())
            + sum(tensor.numel() for tensor in others),
            weight_bytes=sum(each.weight_bytes for each in sizes.values())
            + sum(tensor.nbytes for tensor in others),
            operations=add_up(
                (operation, *self._size_of(linear.parts[0].weight.name))
                for operation, linear in linears_by_operation(linears)
            ),
        )

    def _size_of(self, name: str) -> tuple[int, str]:
        """Return the bytes of a linear, and the number format that it multiplies in."""
        linear = self._linears.get(name)
        if linear is None:  # a tied head
            return self._others[name].nbytes, _name(self._dtype)
        return linear.metrics().weight_bytes, _name(linear.multiplies_in or self._dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
