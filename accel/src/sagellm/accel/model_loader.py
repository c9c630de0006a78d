"""From a checkpoint's tensors to the linears and vectors of one model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sagellm.accel.coded_linear import CodedLinear
from sagellm.accel.linear import LinearMethod, Product, ProductsSideBySide
from sagellm.accel.weights import WeightReader
from sagellm.core import WHOLE, ModelMetrics, TensorSpec
from sagellm.core.protocols.model_spec import FusedLinear


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
        self._linears: list[LinearMethod] = []
        self._others: list[torch.Tensor] = []

    def tensor(self, spec: TensorSpec) -> torch.Tensor:
        """Read a tensor of no linear."""
        tensor = torch.empty(spec.shape, dtype=self._dtype, device=self._device)
        self._others.append(self._weights.load(spec, tensor))
        return tensor

    def linear(self, linear: FusedLinear, method: LinearMethod | None = None) -> LinearMethod:
        """Read the parts of a linear, into a method of the model's kind if none is given."""
        if method is None:
            method = self._method() if linear.form is None else CodedLinear(self._device)
        method.create(linear, WHOLE, self._dtype)
        for part in range(len(linear.parts)):
            method.load(part, self._weights)
        self._linears.append(method)
        return method

    def side_by_side(self, linears: Sequence[FusedLinear]) -> Product:
        """Read linears of one input, whose products lie side by side."""
        products = [self.linear(linear) for linear in linears]
        return products[0] if len(products) == 1 else ProductsSideBySide(products)

    def metrics(self) -> ModelMetrics:
        """Return the size of everything that was read."""
        linears = [linear.metrics() for linear in self._linears]
        return ModelMetrics(
            num_parameters=sum(each.num_parameters for each in linears)
            + sum(tensor.numel() for tensor in self._others),
            weight_bytes=sum(each.weight_bytes for each in linears)
            + sum(tensor.nbytes for tensor in self._others),
        )
