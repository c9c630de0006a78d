"""From mapped tensors of a checkpoint to packed weights, in bounded memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch

from sagellm.accel.int4 import Int4Quantizer
from sagellm.accel.int8 import Int8Quantizer, IntegerQuantizer
from sagellm.accel.native import structures
from sagellm.accel.native.library import NativeLibrary
from sagellm.accel.native.memory import Bytes, pages_for_weights
from sagellm.core import (
    CheckpointError,
    LinearSpec,
    QuantizationGranularity,
    QuantizerProtocol,
    StoredTensor,
    TensorSpec,
    UnsupportedModelError,
    WeightSource,
    check_weight_shape,
)

Floats = npt.NDArray[np.float32]


class WeightKind(IntEnum):
    """How the library stores a matrix."""

    BF16 = 0
    INT8 = 1
    INT4 = 2
    F32 = 3


_STORED = {"BF16": 0, "F16": 1, "F32": 2, "F64": 3}
_KINDS = {torch.bfloat16: WeightKind.BF16, torch.float32: WeightKind.F32}
_ITEMS: dict[WeightKind, type[np.generic]] = {WeightKind.BF16: np.uint16, WeightKind.F32: np.float32}
_AS_STORED = {WeightKind.BF16: _STORED["BF16"], WeightKind.F32: _STORED["F32"]}
_NOT_FINITE, _TOO_LARGE = 1, 2
_MAPPED_BYTES = 16 << 20  # of a file, whose pages count as this process's memory until they are unmapped
_ALIGNMENT = 4096  # each matrix begins on a page of its own


def kind_of(dtype: torch.dtype) -> WeightKind:
    """Return how weights of a dtype are stored. Raises UnsupportedModelError."""
    if dtype not in _KINDS:
        known = ", ".join(str(each) for each in _KINDS)
        raise UnsupportedModelError(f"it computes in {known}, not {dtype}; choose another (--dtype)")
    return _KINDS[dtype]


def check_quantizer(quantizer: QuantizerProtocol | None) -> IntegerQuantizer | None:
    """Return a quantizer whose formulas the library has. Raises UnsupportedModelError for any other."""
    if quantizer is None:
        return None
    kind = type(quantizer)
    if kind not in (Int8Quantizer, Int4Quantizer):
        raise UnsupportedModelError(f"it does not know the quantizer {kind.__name__}")
    assert isinstance(quantizer, IntegerQuantizer), "both are"
    wanted = (
        QuantizationGranularity.PER_CHANNEL if kind is Int8Quantizer else QuantizationGranularity.PER_GROUP
    )
    if quantizer.granularity is not wanted:
        raise UnsupportedModelError(f"it has {kind.__name__} {wanted}, not {quantizer.granularity}")
    return quantizer


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """One packed matrix: linear layers side by side, or a gate with what it multiplies."""

    parts: tuple[LinearSpec, ...]
    kind: WeightKind
    group: int = 0  # inputs per scale (int4)
    is_gated: bool = False

    @property
    def num_outputs(self) -> int:
        """Outputs of all parts."""
        return sum(part.weight.shape[0] for part in self.parts)

    @property
    def num_inputs(self) -> int:
        """Inputs of each part."""
        return self.parts[0].weight.shape[1]


class WeightPacker:
    """Reads each tensor once, straight from the mapped file to its packed form, on all of torch's threads.

    All matrices lie in one mapping of `num_bytes`. Only a few MiB of the files are in memory at a time. All
    values must be finite: one NaN makes all output meaningless.
    """

    def __init__(self, library: NativeLibrary, weights: WeightSource, num_bytes: int) -> None:
        self._library, self._weights = library.functions, weights
        self._memory, self._num_used = pages_for_weights(num_bytes), 0
        self._kept: list[Floats] = []
        self.num_parameters = 0
        self.num_bytes = 0

    @property
    def memory(self) -> tuple[Bytes, list[Floats]]:
        """What has to live as long as the packed weights are used."""
        return self._memory, self._kept

    def linear(self, matrix: Matrix, quantizer: IntegerQuantizer | None) -> structures.Linear:
        """Pack one matrix and its biases. Raises CheckpointError for values that cannot be used."""
        linear = structures.Linear(
            kind=matrix.kind,
            is_gated=matrix.is_gated,
            n=matrix.num_outputs,
            k=matrix.num_inputs,
            group=matrix.group,
            data=self._take(bytes_of(self._library, matrix)),
            bias=self._bias(matrix),
        )
        is_quantized = matrix.kind in (WeightKind.INT8, WeightKind.INT4)
        begin = 0
        for part in matrix.parts:
            if is_quantized and quantizer is not None:
                self._quantize(linear, begin, part.weight, quantizer)
            else:
                self._pack(linear, begin, part.weight)
            begin += part.weight.shape[0]
            self.num_parameters += part.weight.shape[0] * part.weight.shape[1]
        return linear

    def rows(self, tensor: TensorSpec, kind: WeightKind) -> int:
        """Read an embedding row by row; return its address."""
        item = np.dtype(_ITEMS[kind])
        num_rows, width = tensor.shape
        address = self._take(num_rows * width * item.itemsize)
        for begin, view in self._pieces(tensor, 1):
            target = address + begin * width * item.itemsize
            self._convert(tensor, view, _AS_STORED[kind], target)
            del view  # as in `_pack`
        self.num_parameters += num_rows * width
        return address

    def floats(self, tensor: TensorSpec) -> int:
        """Read a vector as float32; return its address."""
        values = np.empty(tensor.shape, np.float32)
        self._convert(
            tensor,
            self._weights.get(TensorSpec(tensor.name, tensor.shape)),
            _STORED["F32"],
            values.ctypes.data,
        )
        self.num_parameters += values.size
        return self._keep(values)

    def are_equal(self, one: TensorSpec, other: TensorSpec) -> bool:
        """Say whether two tensors are stored as the same bytes."""
        a, b = (self._weights.tensors[tensor.name] for tensor in (one, other))
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        return all(
            np.array_equal(x, y)
            for (_, x), (_, y) in zip(self._pieces(one, 1), self._pieces(other, 1), strict=True)
        )

    def _bias(self, matrix: Matrix) -> int | None:
        """Return the biases of all parts, zeros where a part has none; None if no part has any."""
        if all(part.bias is None for part in matrix.parts):
            return None
        values, begin = np.zeros(matrix.num_outputs, np.float32), 0
        for part in matrix.parts:
            if part.bias is not None:
                view = self._weights.get(TensorSpec(part.bias.name, part.bias.shape))
                self._convert(part.bias, view, _STORED["F32"], values[begin:].ctypes.data)
                self.num_parameters += part.bias.shape[0]
            begin += part.weight.shape[0]
        return self._keep(values)

    def _pack(self, linear: structures.Linear, first: int, tensor: TensorSpec) -> None:
        stored = self._stored(tensor)
        for begin, view in self._pieces(tensor, self._library.sage_pack_granularity()):
            status = self._library.sage_pack(
                ctypes.byref(linear),
                first + begin,
                len(view),
                _STORED[stored.dtype],
                view.ctypes.data,
                torch.get_num_threads(),
            )
            self._check(status, tensor)
            del view  # dropping the last view unmaps the file and frees the memory of its pages

    def _quantize(
        self, linear: structures.Linear, first: int, tensor: TensorSpec, quantizer: IntegerQuantizer
    ) -> None:
        stored, max_error = self._stored(tensor), ctypes.c_float()
        for begin, view in self._pieces(tensor, self._library.sage_pack_granularity()):
            status = self._library.sage_pack_quantized(
                ctypes.byref(linear), first + begin, len(view), _STORED[stored.dtype], view.ctypes.data,
                quantizer.clip_ratio, ctypes.byref(max_error), torch.get_num_threads(),
                isinstance(quantizer, Int4Quantizer) and quantizer.search_scales,
            )  # fmt: skip
            self._check(status, tensor)
            del view  # as in `_pack`
        rows, columns = tensor.shape
        scale_bytes = 4 * rows * (columns // linear.group if linear.kind == WeightKind.INT4 else 1)
        code_bytes = rows * columns // (2 if linear.kind == WeightKind.INT4 else 1)
        quantizer.count(stored.num_bytes, code_bytes + scale_bytes, max_error.value)

    def _pieces(self, tensor: TensorSpec, multiple: int) -> Iterator[tuple[int, npt.NDArray[np.generic]]]:
        """Yield some rows of a tensor at a time, a multiple of `multiple`, with the number of the first."""
        stored = self._stored(tensor)
        whole = TensorSpec(tensor.name, tensor.shape)
        num_rows = stored.shape[0]
        at_once = max(1, _MAPPED_BYTES * num_rows // max(1, stored.num_bytes * multiple)) * multiple
        for begin in range(0, num_rows, at_once):
            yield begin, np.ascontiguousarray(self._weights.get(whole)[begin : begin + at_once])

    def _convert(self, tensor: TensorSpec, view: npt.NDArray[np.generic], target: int, address: int) -> None:
        stored = _STORED[self._stored(tensor).dtype]
        view = np.ascontiguousarray(view)
        status = self._library.sage_convert(
            stored, view.ctypes.data, view.size, target, address, torch.get_num_threads()
        )
        self._check(status, tensor)

    def _stored(self, tensor: TensorSpec) -> StoredTensor:
        stored = self._weights.tensors[tensor.name]
        if stored.dtype not in _STORED:
            raise CheckpointError(
                f"{stored.path}: tensor {tensor.name!r} has the type {stored.dtype}; only "
                f"{', '.join(sorted(_STORED))} can be loaded"
            )
        return stored

    def _check(self, status: int, tensor: TensorSpec) -> None:
        what = {
            _NOT_FINITE: "has a value that is NaN or infinite; the checkpoint is damaged, fetch it again",
            _TOO_LARGE: "has a value beyond what the model's dtype can hold; choose another (--dtype)",
        }
        if status:
            path = self._weights.tensors[tensor.name].path
            raise CheckpointError(f"{path}: tensor {tensor.name!r} {what[status]}")

    def _take(self, num_bytes: int) -> int:
        begin = self._num_used
        self._num_used += aligned(num_bytes)
        self.num_bytes += num_bytes
        assert self._num_used <= self._memory.nbytes, "the caller has added up what it takes"
        return int(self._memory.ctypes.data) + begin

    def _keep(self, values: Floats) -> int:
        self._kept.append(values)
        self.num_bytes += values.nbytes
        return int(values.ctypes.data)


def bytes_of(functions: ctypes.CDLL, matrix: Matrix) -> int:
    """Return the packed size of a matrix."""
    return int(functions.sage_weight_bytes(matrix.kind, matrix.num_outputs, matrix.num_inputs, matrix.group))


def aligned(num_bytes: int) -> int:
    """Return what a matrix takes of the mapping."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def quantized_matrix(
    parts: tuple[LinearSpec, ...],
    kind: WeightKind,
    quantizer: IntegerQuantizer | None,
    *,
    is_gated: bool = False,
) -> Matrix:
    """Describe a matrix as the quantizer stores it, or in `kind` without one.

    Raises InvalidInputError for a shape that does not divide into the quantizer's groups.
    """
    if quantizer is None:
        return Matrix(parts=parts, kind=kind, is_gated=is_gated)
    weight = torch.empty(parts[0].weight.shape, device="meta")
    config = quantizer.config_for(weight)
    check_weight_shape(weight, config)
    if isinstance(quantizer, Int4Quantizer):
        return Matrix(parts=parts, kind=WeightKind.INT4, group=config.group_size, is_gated=is_gated)
    return Matrix(parts=parts, kind=WeightKind.INT8, is_gated=is_gated)
