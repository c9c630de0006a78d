"""From mapped tensors of a checkpoint to packed weights, in bounded memory."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from sagellm.accel.coded import expand
from sagellm.accel.native import structures
from sagellm.accel.native.library import NativeLibrary
from sagellm.accel.native.memory import pages_for_weights
from sagellm.accel.native.packed_cache import PackedWeights
from sagellm.accel.threads import num_threads
from sagellm.core import (
    CheckpointError,
    QuantizerProtocol,
    TensorSpec,
    UnsupportedModelError,
    WeightSource,
)
from sagellm.core.protocols.model_spec import FusedLinear, LinearPart
from sagellm.core.protocols.quantizer import IntegerForm
from sagellm.core.protocols.weight_form import CodedRows, CodeType, WeightForm

Floats = npt.NDArray[np.float32]


class WeightKind(IntEnum):
    """How the library stores a matrix."""

    BF16 = 0
    INT8 = 1
    INT4 = 2
    F32 = 3
    INT8_GROUPS = 4
    INT6 = 5


CODES = {
    CodeType.INT4: 1,
    CodeType.INT8: 2,
    CodeType.FP8_E4M3: 3,
    CodeType.FP8_E5M2: 4,
    CodeType.FP4_E2M1: 5,
    CodeType.UINT4: 6,
    CodeType.INT6: 2,
}
"""How the library numbers what codes stand for."""

_CODED_MULTIPLE = 16
_EXPANDED_AT_ONCE = 256

_STORED = {"BF16": 0, "F16": 1, "F32": 2, "F64": 3}
_KINDS = {"bfloat16": WeightKind.BF16, "float32": WeightKind.F32}
_INTEGERS = {8: WeightKind.INT8, 4: WeightKind.INT4}
_ITEMS: dict[WeightKind, type[np.generic]] = {WeightKind.BF16: np.uint16, WeightKind.F32: np.float32}
_AS_STORED = {WeightKind.BF16: _STORED["BF16"], WeightKind.F32: _STORED["F32"]}
_NOT_FINITE, _TOO_LARGE = 1, 2
_ALIGNMENT = 4096  # each matrix begins on a page of its own


def kind_of(dtype: str) -> WeightKind:
    """Return how weights of a dtype are stored. Raises UnsupportedModelError."""
    if dtype not in _KINDS:
        raise UnsupportedModelError(
            f"it computes in {', '.join(_KINDS)}, not {dtype}; choose another (--dtype)"
        )
    return _KINDS[dtype]


def form_of(quantizer: QuantizerProtocol, num_inputs: int) -> IntegerForm:
    """Return what the library makes of weights as a quantizer would. Raises UnsupportedModelError.

    Also InvalidInputError, from the quantizer, for a shape that does not divide into its groups.
    """
    form = quantizer.integer_form(num_inputs)
    if form is None or form.bits not in _INTEGERS or (form.bits == 4) != bool(form.group_size):
        raise UnsupportedModelError(
            f"it cannot make the weights of the quantizer {type(quantizer).__name__} as it is configured; it "
            "makes symmetric int8 with a scale for each output, and symmetric int4 with one for each group"
        )
    if form.group_size and num_inputs % form.group_size:
        raise UnsupportedModelError(
            f"groups of {form.group_size}, by the quantizer {type(quantizer).__name__}, do not divide "
            f"{num_inputs} columns"
        )
    return form


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """One packed matrix: a fused linear of parts that are alike, whose gate may be interleaved with what it
    multiplies.
    """

    linear: FusedLinear
    kind: WeightKind
    form: IntegerForm | None = None  # what the library makes of plain weights; of the kinds INT8 and INT4
    stored: WeightForm | None = None  # what the checkpoint has made of them
    is_gated: bool = False
    has_half_scales: bool = False

    @property
    def group(self) -> int:
        """Inputs that share a scale; 0: all."""
        form = self.form or self.stored
        return form.group_size if form is not None else 0

    def with_bits(self, bits: int) -> Matrix:
        """Return the same with a scale for each output, if the library makes integers of it."""
        if self.form is None:
            return self
        form = replace(self.form, bits=bits, group_size=0)
        return replace(self, kind=_INTEGERS[bits], form=form)

    def described(self) -> structures.Linear:
        """Return the matrix without its memory."""
        num_outputs, num_inputs = self.linear.shape
        linear = structures.Linear(
            kind=self.kind, is_gated=self.is_gated, n=num_outputs, k=num_inputs, group=self.group
        )
        stored = self.stored
        if stored is None:
            return linear
        linear.has_half_scales = self.has_half_scales
        linear.has_zeros, linear.has_offsets = stored.has_zeros, stored.has_offsets
        linear.scale_group = stored.scale_group
        if self.kind not in _KINDS.values():
            linear.is_unsigned = stored.code is CodeType.UINT4
            linear.has_one_scale = stored.activations is not None and not stored.activations.group_size
            return linear
        linear.code = CODES[stored.code]
        if stored.activations is not None:
            linear.input_code = CODES[stored.activations.code]
            linear.input_group = stored.activations.group_size
            linear.input_scale = stored.activations.scale or 0.0
        return linear


class WeightPacker:
    """Reads each tensor once, straight from the mapped file to its packed form, on all of torch's threads.

    All matrices lie in one mapping of `num_bytes`. Only a few MiB of the files are in memory at a time. All
    values must be finite: one NaN makes all output meaningless. With `packed`, which an earlier packer of the
    same model has made, nothing is read or packed again.
    """

    def __init__(
        self,
        library: NativeLibrary,
        weights: WeightSource,
        num_bytes: int,
        packed: PackedWeights | None = None,
    ) -> None:
        self._library, self._weights, self._given = library.functions, weights, packed
        self._memory = pages_for_weights(num_bytes) if packed is None else packed.memory
        self._num_used = 0
        self._kept: list[npt.NDArray[np.generic]] = []  # vectors
        self._mapped: list[npt.NDArray[np.generic]] = []  # rows that stay in their file
        self._errors: list[float] = []
        self.num_parameters = 0
        self.num_bytes = 0

    @property
    def memory(self) -> tuple[PackedWeights, list[npt.NDArray[np.generic]]]:
        """What has to live as long as the weights are used: the packed ones, and rows that stay in a file."""
        return PackedWeights(self._memory, self._kept, self._errors), self._mapped

    def linear(self, matrix: Matrix, quantizer: QuantizerProtocol | None) -> structures.Linear:
        """Pack one matrix and its biases. Raises CheckpointError for values that cannot be used."""
        num_outputs, num_inputs = matrix.linear.shape
        linear = matrix.described()
        linear.data = self._take(bytes_of(self._library, matrix))
        linear.bias = self._bias(matrix.linear)
        order = matrix.linear.parts[0].order
        if order is not None and matrix.stored is not None:
            linear.order = self._keep(order.astype(np.int32))
        for part in matrix.linear.parts:
            if part.stored.form is not None:
                self._pack_codes(linear, part, matrix)
                continue
            max_error = self._pack(linear, part, matrix.form)
            self._errors.append(max_error)
            if matrix.form is not None and quantizer is not None:
                quantizer.count(part.stored.num_bytes, _packed_bytes(part, matrix.form), max_error)
        self.num_parameters += num_outputs * num_inputs
        return linear

    def rows(self, tensor: TensorSpec, kind: WeightKind) -> int:
        """Return the address of an embedding's rows.

        They stay in the mapped file if they are stored as they are used; others are converted.
        """
        if is_used_as_stored(self._weights, tensor, kind):
            return self._map(tensor, kind)
        item = np.dtype(_ITEMS[kind])
        num_rows, width = tensor.shape
        address = self._take(num_rows * width * item.itemsize)
        for begin, rows in () if self._given is not None else self._plain_pieces(tensor):
            target = address + begin * width * item.itemsize
            self._convert(tensor, rows, _AS_STORED[kind], target)
            del rows  # as in `_pack`
        self.num_parameters += num_rows * width
        return address

    def _map(self, tensor: TensorSpec, kind: WeightKind) -> int:
        checked = np.empty(0, np.uint8)
        for _, rows in () if self._given is not None else self._weights.pieces(tensor):
            if checked.nbytes < rows.nbytes:
                checked = np.empty(rows.nbytes, np.uint8)
            self._convert(tensor, rows, _AS_STORED[kind], checked.ctypes.data)  # it finds NaN on all threads
            del rows  # as in `_pack`
        self.num_parameters += math.prod(tensor.shape)
        rows = self._weights.get(tensor)
        self._mapped.append(rows)
        self.num_bytes += rows.nbytes
        return int(rows.ctypes.data)

    def _plain_pieces(self, tensor: TensorSpec) -> Iterator[tuple[int, npt.NDArray[np.generic]]]:
        """Yield pieces of rows as they are stored, or as the float32 that codes stand for."""
        form = self._weights.tensors[tensor.name].form
        if form is None:
            yield from self._weights.pieces(tensor)
            return
        order = self._weights.input_order(tensor)
        for begin, rows in self._weights.coded_pieces(tensor):
            for first in range(0, len(rows.codes), _EXPANDED_AT_ONCE):
                yield begin + first, expand(rows[first : first + _EXPANDED_AT_ONCE], form, order)

    def floats(self, tensor: TensorSpec) -> int:
        """Read a vector as float32; return its address."""
        values = np.empty(tensor.shape, np.float32)
        self._convert(tensor, self._weights.get(tensor), _STORED["F32"], values.ctypes.data)
        self.num_parameters += values.size
        return self._keep(values)

    def _bias(self, linear: FusedLinear) -> int | None:
        """Return the biases of all parts, zeros where a part has none; None if no part has any."""
        if not linear.has_bias:
            return None
        values = np.zeros(linear.shape[0], np.float32)
        for part in linear.parts:
            if part.bias is not None:
                target = values[part.outputs].ctypes.data
                self._convert(part.bias, self._weights.get(part.bias), _STORED["F32"], target)
                self.num_parameters += part.bias.shape[0]
        return self._keep(values)

    def _pack(self, linear: structures.Linear, part: LinearPart, form: IntegerForm | None) -> float:
        """Pack a part's rows, and return the largest error in steps if they become integers."""
        if self._given is not None:
            return self._given.errors[len(self._errors)]
        max_error, stored = ctypes.c_float(), _STORED[part.stored.dtype]
        for begin, view in self._weights.pieces(part.weight, self._library.sage_pack_granularity()):
            rows = np.ascontiguousarray(view)
            given = (
                ctypes.byref(linear), part.outputs.start + begin, len(rows), stored, rows.ctypes.data
            )  # fmt: skip
            if form is None:
                status = self._library.sage_pack(*given, num_threads())
            else:
                status = self._library.sage_pack_quantized(
                    *given,
                    form.clip_ratio,
                    ctypes.byref(max_error),
                    num_threads(),
                    form.searches_scales,
                )
            self._check(status, part.weight)
            del view, rows  # dropping the last view unmaps the file and frees the memory of its pages
        return float(max_error.value)

    def _pack_codes(self, linear: structures.Linear, part: LinearPart, matrix: Matrix) -> None:
        """Pack a part's codes as they are, or the weights that they stand for if the matrix is plain."""
        if self._given is not None:
            return
        threads = num_threads()
        if matrix.stored is None:
            for begin, weights in self._plain_pieces(part.weight):
                place = part.outputs.start + begin, len(weights)
                status = self._library.sage_pack(
                    ctypes.byref(linear), *place, _STORED["F32"], weights.ctypes.data, threads
                )
                self._check(status, part.weight)
            return
        for begin, rows in self._weights.coded_pieces(part.weight, self._library.sage_pack_granularity()):
            place = part.outputs.start + begin, len(rows.codes)
            arrays = given_rows(rows, matrix.stored, has_half_scales=matrix.has_half_scales)
            addresses = [None if array is None else array.ctypes.data for array in arrays]
            coded = structures.CodedRows(*addresses)
            self._library.sage_pack_codes(ctypes.byref(linear), *place, ctypes.byref(coded), threads)
            del rows, arrays

    def _convert(self, tensor: TensorSpec, view: npt.NDArray[np.generic], target: int, address: int) -> None:
        if self._given is not None:
            return
        held = self._weights.tensors[tensor.name]
        stored = _STORED["F32" if held.form is not None else held.dtype]
        view = np.ascontiguousarray(view)
        status = self._library.sage_convert(
            stored, view.ctypes.data, view.size, target, address, num_threads()
        )
        self._check(status, tensor)

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

    def _keep(self, values: npt.NDArray[np.generic]) -> int:
        if self._given is not None:
            values = self._given.vectors[len(self._kept)]
        self._kept.append(values)
        self.num_bytes += values.nbytes
        return int(values.ctypes.data)


def given_rows(
    rows: CodedRows, form: WeightForm, *, has_half_scales: bool
) -> list[npt.NDArray[np.generic] | None]:
    """Return the arrays of `structures.CodedRows` in the types that the library reads.

    Raises CheckpointError if one is missing that the form speaks of.
    """
    wide = np.float16 if has_half_scales else np.float32
    in_bytes = form.scale_group > 0
    types = {
        "codes": None,
        "scales": np.int8 if in_bytes else wide,
        "zeros": np.int8,
        "offsets": np.int8 if in_bytes else np.float32,
        "factors": np.float16,
        "offset_factors": np.float16,
    }
    arrays = {name: getattr(rows, name) for name in types}
    wanted = {
        "zeros": form.has_zeros,
        "offsets": form.has_offsets,
        "factors": in_bytes,
        "offset_factors": in_bytes and form.has_offsets,
    }
    if missing := [name for name, is_wanted in wanted.items() if is_wanted and arrays[name] is None]:
        raise CheckpointError(f"rows of a weight in {form} come without {', '.join(missing)}")
    return [
        None if array is None else np.ascontiguousarray(array, types[name]) for name, array in arrays.items()
    ]


def bytes_of(functions: ctypes.CDLL, matrix: Matrix) -> int:
    """Return the packed size of a matrix."""
    return int(functions.sage_weight_bytes(ctypes.byref(matrix.described())))


def is_used_as_stored(weights: WeightSource, tensor: TensorSpec, kind: WeightKind) -> bool:
    """Say whether the stored rows of a tensor are what the library reads, so that they need no copy."""
    stored = weights.tensors[tensor.name]
    return stored.form is None and stored.dtype == kind.name and weights.get(tensor).flags.c_contiguous


def aligned(num_bytes: int) -> int:
    """Return what a matrix takes of the mapping."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def matrix_of(
    linear: FusedLinear,
    kind: WeightKind,
    quantizer: QuantizerProtocol | None,
    weights: WeightSource,
    *,
    is_gated: bool = False,
) -> Matrix:
    """Describe a linear of parts that are alike: as the checkpoint stores it quantized, else as the quantizer
    makes it, or in `kind` without one. Raises as `form_of`, and UnsupportedModelError.
    """
    stored = linear.form
    if stored is not None:
        return _stored_matrix(linear, stored, kind, weights, is_gated=is_gated)
    if quantizer is None:
        return Matrix(linear=linear, kind=kind, is_gated=is_gated)
    form = form_of(quantizer, linear.shape[1])
    return Matrix(linear=linear, kind=_INTEGERS[form.bits], form=form, is_gated=is_gated)


def plain_matrix(linear: FusedLinear, kind: WeightKind, *, is_gated: bool = False) -> Matrix:
    """Describe a linear as the plain weights that its parts, in different forms, stand for."""
    return Matrix(linear=linear, kind=kind, is_gated=is_gated)


def _stored_matrix(
    linear: FusedLinear, form: WeightForm, kind: WeightKind, weights: WeightSource, *, is_gated: bool
) -> Matrix:
    num_inputs, name = linear.shape[1], linear.parts[0].weight.name
    if num_inputs % _CODED_MULTIPLE or form.group_size % _CODED_MULTIPLE:
        raise UnsupportedModelError(
            f"{name} has {num_inputs} inputs in groups of {form.group_size or num_inputs}; it takes "
            f"multiples of {_CODED_MULTIPLE}"
        )
    multiplied = _integers_of(form) or kind
    has_half_scales = multiplied is not WeightKind.INT8 and all(
        weights.coded_rows(part.weight, slice(0, 1)).scales.dtype == np.float16 for part in linear.parts
    )
    return Matrix(
        linear=linear, kind=multiplied, stored=form, is_gated=is_gated, has_half_scales=has_half_scales
    )


def _integers_of(form: WeightForm) -> WeightKind | None:
    """Return the kind that multiplies the codes themselves, if activations are integers too."""
    activations = form.activations
    if activations is None or activations.code is not CodeType.INT8 or activations.scale is not None:
        return None
    if activations.group_size not in (0, form.group_size):
        return None
    if form.code in (CodeType.INT4, CodeType.UINT4) and form.group_size % 32 == 0:
        return WeightKind.INT4
    if form.code is CodeType.INT6 and form.group_size % 16 == 0:
        return WeightKind.INT6
    if form.code is not CodeType.INT8 or form.group_size % 16:
        return None
    is_plain = not (form.group_size or form.has_zeros or form.has_offsets)
    return WeightKind.INT8 if is_plain else WeightKind.INT8_GROUPS


def _packed_bytes(part: LinearPart, form: IntegerForm) -> int:
    """Return what the codes and scales of a part take."""
    rows, columns = part.weight.shape
    num_groups = columns // form.group_size if form.group_size else 1
    return rows * columns * form.bits // 8 + 4 * rows * num_groups
