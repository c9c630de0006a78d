"""Reading tensors out of safetensors files, in bounded memory.

Files are read, never mapped: pages of a mapping would count as this process' memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import torch

from sagellm.core import CheckpointError
from sagellm.engines.loading.safetensors_header import ITEM_BYTES, StoredTensor

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_FLOATS = {"F16", "BF16", "F32", "F64"}
_STAGING_BYTES = 16 << 20


class WeightReader:
    """Reads one tensor at a time; floating-point ones come in the wanted dtype.

    Peak memory is the tensor itself, plus 16 MiB where its type or device changes. Calls may come
    from several threads. `on_read` is told the bytes of each tensor.
    """

    def __init__(
        self,
        tensors: Mapping[str, StoredTensor],
        dtype: torch.dtype,
        on_read: Callable[[float], None] = lambda num_bytes: None,
    ) -> None:
        self._tensors = tensors
        self._dtype = dtype
        self._on_read = on_read

    def load(self, name: str, out: torch.Tensor | None = None) -> torch.Tensor:
        """Read a tensor, into `out` if that is given, on whatever device it is.

        Raises CheckpointError if its type cannot be used or the file has changed.
        """
        stored = self._tensors[name]
        if stored.dtype not in _DTYPES:
            raise CheckpointError(
                f"{stored.path}: tensor {name!r} has the type {stored.dtype}; only plain integers and "
                f"{', '.join(sorted(_FLOATS))} can be loaded"
            )
        source = _DTYPES[stored.dtype]
        target = self._dtype if stored.dtype in _FLOATS else source
        if out is None:
            out = torch.empty(stored.shape, dtype=target)
        assert out.shape == stored.shape, "out has the tensor's shape"
        assert out.is_contiguous(), "out is one piece"
        if not stored.num_bytes:
            return out
        try:
            with open(stored.path, "rb", buffering=0) as file:
                if source == out.dtype and out.device.type == "cpu":
                    _fill(file.fileno(), out.view(-1).view(torch.uint8), stored.offset)
                else:
                    _fill_staged(file.fileno(), out, stored, source)
        except EOFError:
            raise CheckpointError(f"{stored.path} became shorter while it was read") from None
        self._on_read(stored.num_bytes)
        return out


def _fill(descriptor: int, target: torch.Tensor, offset: int) -> None:
    view = memoryview(target.numpy().data)
    while len(view):
        count = os.preadv(descriptor, [view], offset)
        if not count:
            raise EOFError
        view, offset = view[count:], offset + count


def _fill_staged(descriptor: int, tensor: torch.Tensor, stored: StoredTensor, source: torch.dtype) -> None:
    flat, item_bytes = tensor.view(-1), ITEM_BYTES[stored.dtype]
    staging = torch.empty(min(flat.numel(), _STAGING_BYTES // item_bytes), dtype=source)
    for begin in range(0, flat.numel(), staging.numel()):
        part = flat[begin : begin + staging.numel()]
        piece = staging[: part.numel()]
        _fill(descriptor, piece.view(torch.uint8), stored.offset + begin * item_bytes)
        part.copy_(piece)
