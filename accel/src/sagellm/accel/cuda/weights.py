"""Reading weights into the memory of a device."""

from __future__ import annotations

import numpy as np
import torch

from sagellm.core import CheckpointError, Shard, TensorSpec, UnsupportedModelError, WeightSource

_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
_PIECE_BYTES = 16 << 20


class DeviceWeights:
    """Copies tensors piece by piece through memory that the device reads directly."""

    def __init__(self, weights: WeightSource, dtype: torch.dtype, device: torch.device) -> None:
        self._weights, self._dtype, self._device = weights, dtype, device
        self._staging = torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def load(self, *tensors: TensorSpec) -> torch.Tensor:
        """Return tensors one below the other, in the model's dtype.

        Raises UnsupportedModelError for a stored type other than a float of 16 to 64 bits, and
        CheckpointError for values that are not finite or become so in that dtype.
        """
        rows = [tensor.shape[0] for tensor in tensors]
        out = torch.empty(sum(rows), *tensors[0].shape[1:], dtype=self._dtype, device=self._device)
        for tensor, place in zip(tensors, out.split(rows), strict=True):  # type: ignore[no-untyped-call]
            self._fill(tensor, place)
        return out

    def _fill(self, tensor: TensorSpec, out: torch.Tensor) -> None:
        stored = self._weights.tensors[tensor.name]
        dtype = _DTYPES.get(stored.dtype)
        if dtype is None:
            raise UnsupportedModelError(
                f"tensor {tensor.name!r} is stored as {stored.dtype}; the backend cuda reads "
                f"{', '.join(_DTYPES)}"
            )
        num_pieces = max(1, min(tensor.shape[0], -(-stored.num_bytes // _PIECE_BYTES)))
        rows = TensorSpec(tensor.name, tensor.shape, 0)
        for rank in range(num_pieces):
            piece = Shard(rank, num_pieces)
            array = np.ascontiguousarray(self._weights.get(rows, piece)).view(np.uint8).reshape(-1)
            if len(array) > len(self._staging):  # a single row is longer than the staging memory
                self._staging = torch.empty(len(array), dtype=torch.uint8)
            staged = self._staging[: len(array)]
            np.copyto(staged.numpy(), array)
            target = out[piece.of(tensor.shape[0])]
            target.copy_(staged.view(dtype).view(target.shape))
        if not bool(out.isfinite().all()):
            raise CheckpointError(
                f"{stored.path}: tensor {tensor.name!r} has a value that is NaN or infinite, or that "
                f"{self._dtype} cannot hold; fetch the checkpoint again or choose another dtype"
            )
