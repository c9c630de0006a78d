"""A checkpoint whose linear weights are pruned while they are read, for any forward backend."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from sagellm.accel.weights import DTYPES
from sagellm.core import (
    WHOLE,
    CheckpointError,
    ExpertsSpec,
    InvalidInputError,
    ModelSpec,
    PluginError,
    Shard,
    SparsifierProtocol,
    TensorSpec,
    UnsupportedModelError,
    WeightSource,
)
from sagellm.core.protocols.weight_form import CodedRows


class PrunedWeights(WeightSource):
    """The tensors of another source, with the weights of the layers' linears pruned.

    Embedding, head, router and norms stay as they are. Weights are pruned in the format in which they are
    stored, some rows at a time, on the device that will multiply by them. Raises UnsupportedModelError for a
    model that runs as a class of transformers, whose linears no spec names; CheckpointError for weights that
    are stored quantized.
    """

    def __init__(
        self, weights: WeightSource, spec: ModelSpec, sparsifier: SparsifierProtocol, device: torch.device
    ) -> None:
        self.tensors = weights.tensors
        self._weights, self._sparsifier, self._device = weights, sparsifier, device
        self._names = _linears(spec)
        for name in sorted(self._names):
            stored = weights.tensors[name]
            dtype = DTYPES.get(stored.dtype)
            if stored.form is not None or dtype is None or not dtype.is_floating_point:
                raise CheckpointError(
                    f"{stored.path}: tensor {name!r} is stored as {stored.dtype}, and only plain "
                    "floating-point weights can be pruned; unset model.sparsity, or take the checkpoint "
                    "from before it was quantized"
                )

    def get(self, tensor: TensorSpec, shard: Shard = WHOLE) -> npt.NDArray[np.generic]:
        """Return a tensor; one that is pruned is a copy, since groups may be cut by a shard."""
        if tensor.name not in self._names:
            return self._weights.get(tensor, shard)
        pruned = self._prune(tensor, 0, self._weights.get(tensor))
        if tensor.shard_axis is None:
            return pruned
        part = shard.of(pruned.shape[tensor.shard_axis], tensor.shard_unit)
        return pruned[part] if tensor.shard_axis == 0 else pruned[:, part]

    def pieces(self, tensor: TensorSpec, multiple: int = 1) -> Iterator[tuple[int, npt.NDArray[np.generic]]]:
        """Yield a tensor's pieces, each pruned if the tensor is."""
        is_pruned = tensor.name in self._names
        for begin, rows in self._weights.pieces(tensor, multiple):
            yield begin, self._prune(tensor, begin, rows) if is_pruned else rows
            del rows  # before the next piece is made

    def coded_rows(self, tensor: TensorSpec, rows: slice, shard: Shard = WHOLE) -> CodedRows:
        """Return rows of a quantized weight that is not a layer's."""
        return self._weights.coded_rows(tensor, rows, shard)

    def input_order(self, tensor: TensorSpec) -> npt.NDArray[np.int64] | None:
        """Return what the other source does."""
        return self._weights.input_order(tensor)

    def _prune(
        self, tensor: TensorSpec, begin: int, rows: npt.NDArray[np.generic]
    ) -> npt.NDArray[np.generic]:
        stored = self.tensors[tensor.name]
        bytes_of_rows = torch.from_numpy(np.array(rows).view(np.uint8))  # a view of the file is read-only
        dense = bytes_of_rows.view(DTYPES[stored.dtype]).to(self._device)
        try:
            pruned = self._sparsifier.prune(dense)
        except InvalidInputError as error:
            of = f"rows from {begin} of tensor" if begin else "tensor"
            raise CheckpointError(f"{stored.path}: {of} {tensor.name!r}: {error}") from error
        if (pruned.shape, pruned.dtype) != (dense.shape, dense.dtype):
            raise PluginError(
                f"the sparsifier {type(self._sparsifier).__name__} made {pruned.dtype} {tuple(pruned.shape)} "
                f"of {dense.dtype} {tuple(dense.shape)}; prune() must keep both"
            )
        array: npt.NDArray[np.generic] = pruned.cpu().contiguous().view(torch.uint8).numpy().view(rows.dtype)
        return array


def _linears(spec: ModelSpec) -> frozenset[str]:
    """Return the names of the weights of the layers' linears, without routers."""
    if spec.decoder is None:
        raise UnsupportedModelError(
            f"model.sparsity prunes models of sageLLM's own families, and {spec.architecture} runs as a "
            "class of transformers; unset model.sparsity, or prune the checkpoint itself"
        )
    forwards = [layer.feed_forward for layer in spec.decoder.layers]
    routers = {each.router.weight.name for each in forwards if isinstance(each, ExpertsSpec)}
    linears = chain.from_iterable(layer.linears for layer in spec.decoder.layers)
    return frozenset(linear.weight.name for linear in linears) - routers
