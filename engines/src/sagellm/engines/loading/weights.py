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
_PIECE_BYTES = 1 << 20  # small enough to be checked while it is in a core's own cache
# The integer type of the same width, and the bits of infinity.
_BITS: dict[torch.dtype, tuple[torch.dtype, int]] = {
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
    torch.float32: (torch.int32, 0x7F80_0000),
    torch.float64: (torch.int64, 0x7FF0 << 48),
}


class WeightReader:
    """Reads one tensor at a time; floating-point ones come in the wanted dtype.

    Peak memory is the tensor itself, plus 16 MiB where its type or device changes. Calls may come
    from several threads. `on_read` is called with the bytes of each tensor. All values must be finite, which
    a core checks at about 12 GB/s: one NaN makes all output meaningless.
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

        Raises CheckpointError if its type cannot be used, if a value is NaN or infinite, or if the file has
        changed.
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
                    _fill_checked(file.fileno(), out, stored)
                else:
                    _fill_staged(file.fileno(), out, stored, source)
        except EOFError:
            raise CheckpointError(f"{stored.path} became shorter while it was read") from None
        except _NotFiniteError as error:
            raise CheckpointError(f"{stored.path}: tensor {name!r} {error}") from None
        self._on_read(stored.num_bytes)
        return out


class _NotFiniteError(Exception):
    """A value is NaN or infinite, or becomes so in the target dtype."""


def _fill_checked(descriptor: int, tensor: torch.Tensor, stored: StoredTensor) -> None:
    flat, size = tensor.view(-1), max(1, _PIECE_BYTES // tensor.itemsize)
    for begin in range(0, flat.numel(), size):
        part = flat[begin : begin + size]
        _fill(descriptor, part.view(torch.uint8), stored.offset + begin * tensor.itemsize)
        _check_finite(part, part)


def _check_finite(values: torch.Tensor, stored: torch.Tensor) -> None:
    """Check values that were converted from stored ones. Raises _NotFiniteError."""
    widened = (
        values.itemsize > stored.itemsize
    )  # a wider dtype holds every stored value, so checking those suffices
    if _are_finite(stored if widened else values):
        return
    if not widened and _are_finite(stored):
        raise _NotFiniteError(f"has a value beyond what {values.dtype} can hold; choose another (--dtype)")
    raise _NotFiniteError("has a value that is NaN or infinite; the checkpoint is damaged, fetch it again")


def _are_finite(values: torch.Tensor) -> bool:
    """Say whether all values are finite, by two maxima over their bits as integers; a sum could overflow.

    NaN and infinity have all exponent bits set, so apart from the sign bit their bits are larger than those
    of any finite value: the signed maximum finds positive ones, the unsigned maximum negative ones.
    """
    if values.dtype not in _BITS:
        return True
    if values.device.type != "cpu":
        return bool(values.isfinite().all())
    kind, limit = _BITS[values.dtype]
    bits = values.view(kind).numpy()
    sign = 1 << (8 * values.itemsize - 1)
    return bool(bits.max() < limit and bits.view(f"u{values.itemsize}").max() < limit | sign)


def _fill(descriptor: int, target: torch.Tensor, offset: int) -> None:
    view = memoryview(target.numpy().data)
    while len(view):
        count = os.preadv(descriptor, [view], offset)
        if not count:
            raise EOFError
        view, offset = view[count:], offset + count


def _fill_staged(descriptor: int, tensor: torch.Tensor, stored: StoredTensor, source: torch.dtype) -> None:
    flat, item_bytes = tensor.view(-1), ITEM_BYTES[stored.dtype]
    most = _PIECE_BYTES if tensor.device.type == "cpu" else _STAGING_BYTES
    staging = torch.empty(min(flat.numel(), most // item_bytes), dtype=source)
    for begin in range(0, flat.numel(), staging.numel()):
        part = flat[begin : begin + staging.numel()]
        piece = staging[: part.numel()]
        _fill(descriptor, piece.view(torch.uint8), stored.offset + begin * item_bytes)
        part.copy_(piece)
        _check_finite(part, piece)
