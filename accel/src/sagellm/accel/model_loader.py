"""From a checkpoint's tensors to the linears and vectors of one model."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sagellm.accel.coded_linear import CodedLinear, LinearsSideBySide
from sagellm.accel.linear import LinearMethod
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
        method = self._choose(linear) if method is None else method
        method.create(linear, WHOLE, self._dtype)
        for part in range(len(linear.parts)):
            method.load(part, self._weights)
        self._linears.append(method)
        return method

    def _choose(self, linear: FusedLinear) -> LinearMethod:
        """Return the model's method for plain weights, and those of their forms for quantized ones."""
        methods = [self._method() if run.form is None else CodedLinear(self._device) for run in linear.runs]
        return methods[0] if len(methods) == 1 else LinearsSideBySide(methods)

    def metrics(self) -> ModelMetrics:
        """Return the size of everything that was read."""
        linears = [linear.metrics() for linear in self._linears]
        return ModelMetrics(
            num_parameters=sum(each.num_parameters for each in linears)
            + sum(tensor.numel() for tensor in self._others),
            weight_bytes=sum(each.weight_bytes for each in linears)
            + sum(tensor.nbytes for tensor in self._others),
        )
