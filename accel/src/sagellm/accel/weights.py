"""Copying tensors out of a weight source to a device, in bounded memory.

safetensors' own loading makes a whole tensor beside its final place, and looks at no value.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from sagellm.accel.coded import expand
from sagellm.accel.slices import row_slices
from sagellm.core import CheckpointError, TensorSpec, WeightSource
from sagellm.core.protocols.weight_form import WeightForm

DTYPES = {
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
    """Copies one tensor at a time to its final place; floating-point ones are converted to the target dtype.

    Only a few MiB of the files are in memory at a time. Calls may come from several threads. All values must
    be finite, which a core checks at about 12 GB/s: one NaN makes all output meaningless.
    """

    def __init__(self, weights: WeightSource, dtype: torch.dtype) -> None:
        self.source = weights
        self._dtype = dtype

    def load(self, tensor: TensorSpec, out: torch.Tensor | None = None) -> torch.Tensor:
        """Read a tensor, into `out` if given, on any device.

        Raises CheckpointError if its type cannot be used, if a value is NaN or infinite, or if the file has
        changed.
        """
        stored = self.source.tensors[tensor.name]
        if stored.form is not None:
            return self._expand(tensor, stored.form, out)
        if stored.dtype not in DTYPES:
            raise CheckpointError(
                f"{stored.path}: tensor {tensor.name!r} has the type {stored.dtype}; only plain integers and "
                f"{', '.join(sorted(_FLOATS))} can be loaded"
            )
        source = DTYPES[stored.dtype]
        target = self._dtype if stored.dtype in _FLOATS else source
        if out is None:
            out = torch.empty(stored.shape, dtype=target)
        assert out.shape == stored.shape, "out has the tensor's shape"
        assert out.is_contiguous(), "out is one piece"
        begin, flat = 0, out.view(-1)
        try:
            for _, rows in self.source.pieces(tensor):
                array = rows.reshape(-1)
                _fill(flat[begin : begin + array.size], array, source)
                begin += array.size
                del rows, array  # dropping the last view unmaps the file and frees the memory of its pages
        except _NotFiniteError as error:
            raise CheckpointError(f"{stored.path}: tensor {tensor.name!r} {error}") from None
        return out

    def _expand(self, tensor: TensorSpec, form: WeightForm, out: torch.Tensor | None) -> torch.Tensor:
        """Read a quantized weight as the numbers that it stands for."""
        order = self.source.input_order(tensor)
        if out is None:
            out = torch.empty(tensor.shape, dtype=self._dtype)
        for begin, rows in self.source.coded_pieces(tensor):
            for first, last in row_slices(len(rows.codes), tensor.shape[1] * 12, out.device):
                out[begin + first : begin + last] = torch.from_numpy(expand(rows[first:last], form, order))
            del rows
        return out


class _NotFiniteError(Exception):
    """A value is NaN or infinite, or becomes so in the target dtype."""


def _fill(out: torch.Tensor, array: npt.NDArray[np.generic], source: torch.dtype) -> None:
    """Copy values piece by piece, through a staging tensor where their type or the device changes."""
    is_staged = source != out.dtype or out.device.type != "cpu"
    most = _STAGING_BYTES if out.device.type != "cpu" else _PIECE_BYTES
    size = max(1, min(len(out), most // source.itemsize))
    staging = torch.empty(size if is_staged else 0, dtype=source, pin_memory=out.device.type == "cuda")
    raw = array.view(np.uint8)
    for begin in range(0, len(out), size):
        part = out[begin : begin + size]
        piece = staging[: len(part)] if is_staged else part
        place = slice(begin * source.itemsize, (begin + len(part)) * source.itemsize)
        np.copyto(piece.view(torch.uint8).numpy(), raw[place])
        if is_staged:
            part.copy_(piece)
        _check_finite(part, piece)


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
