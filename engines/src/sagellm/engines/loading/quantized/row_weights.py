"""Weights whose codes lie output by output, as the kernels want them: most are read without a copy."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sagellm.core.protocols.weight_form import CodeType, WeightForm
from sagellm.engines.loading.quantized.codes import (
    Array,
    nibbles_of,
    packed_nibbles,
    powers_of_two,
    signed,
    taken,
)
from sagellm.engines.loading.quantized.weights import (
    SCALE_DTYPES,
    CodedWeight,
    StoredModule,
    order_of,
    spread,
)


@dataclass(frozen=True)
class ScaleGrid:
    """How many outputs and groups share each entry of a tensor of scales."""

    outputs: int = 1
    groups: int = 1


@dataclass(frozen=True, kw_only=True)
class RowWeight(CodedWeight):
    """Codes (out, in) of a byte each, with scales (rows, columns) or one."""

    grid: ScaleGrid
    values: str = "weight"
    scale: str = "weight_scale"
    zero_point: str | None = None

    def codes(self, rows: slice, columns: slice) -> Array:
        """Return a view of the file; numbers of 4 bits that are stored as bytes are put two to a byte."""
        codes = self.module.get(self.values)[rows, columns]
        if self.form.code is not CodeType.INT4:
            return codes
        if codes.size and not -8 <= codes.min() <= codes.max() <= 7:
            raise self.module.error("has a value beyond 4 bits, -8 to 7")
        return packed_nibbles((codes + 8).view(np.uint8))

    def scales(self, rows: slice, groups: slice) -> Array:
        """Return the entry of each output and group."""
        return self._spread(self.module.get_floats(self.scale), rows, groups)

    def zeros(self, rows: slice, groups: slice) -> npt.NDArray[np.int8] | None:
        """Return those of a form that has some; in one that has none, all must be zero."""
        if self.zero_point is None:
            return None
        zeros = self._spread(self.module.get(self.zero_point), rows, groups)
        if self.form.has_zeros:
            limit = 1 << (self.form.code.bits - 1)
            if zeros.size and not -limit <= zeros.min() <= zeros.max() < limit:
                raise self.module.error(f"has a zero point beyond {-limit} to {limit - 1}")
            return zeros
        if zeros.any():
            raise self.module.error("has zero points, but is quantized symmetrically according to the config")
        return None

    def _spread(self, values: Array, rows: slice, groups: slice) -> Array:
        values = values.reshape(-1, 1) if values.ndim < 2 else values
        return spread(values, rows, groups, self.grid.outputs, self.grid.groups)


@dataclass(frozen=True, kw_only=True)
class PackedWeight(CodedWeight):
    """Numbers of 4 or 8 bits with an offset, as many as fit to an int32, the first in its low bits.

    In memory these are bytes with their codes in order: those of 4 bits need no change at all.
    """

    group_index: str | None = None
    has_one_scale: bool = False

    def codes(self, rows: slice, columns: slice) -> Array:
        """Return them as bytes."""
        bits = self.form.code.bits
        packed = self.module.get("weight_packed")[rows].view(np.uint8)
        order = self.order()
        if order is not None:
            packed = taken(packed, bits, order[columns])
        else:
            packed = packed[:, columns.start * bits // 8 : columns.stop * bits // 8]
        return packed if bits == 4 else signed(packed)

    def scales(self, rows: slice, groups: slice) -> Array:
        """Return a slice of them."""
        if not self.has_one_scale:
            return self.module.get_floats("weight_scale", rows, groups)
        return np.repeat(self.module.get_floats("weight_scale").reshape(1, 1), rows.stop - rows.start, axis=0)

    def zeros(self, rows: slice, groups: slice) -> npt.NDArray[np.int8] | None:
        """Return zero points, which are packed along outputs."""
        if not self.form.has_zeros:
            return None
        bits = self.form.code.bits
        at_once = 32 // bits
        words = self.module.get("weight_zero_point")[
            rows.start // at_once : math.ceil(rows.stop / at_once), groups
        ]
        begin = rows.start % at_once
        codes = np.ascontiguousarray(words.T).view(np.uint8)  # (groups, bytes)
        numbers = nibbles_of(codes).view(np.int8) - np.int8(8) if bits == 4 else signed(codes)
        return numbers[:, begin : begin + rows.stop - rows.start].T

    def order(self) -> npt.NDArray[np.int64] | None:
        """Return the input of each column, by the group index."""
        return order_of(self.module, self.group_index) if self.group_index is not None else None


@dataclass(frozen=True, kw_only=True)
class MicroscaledWeight(CodedWeight):
    """MXFP4: FP4 codes, two to a byte, with a power of two for each 32. A view of the file.

    The layout is that of OCP's Microscaling Formats 1.0, the first code in the low bits.
    """

    values: str
    scale: str

    def codes(self, rows: slice, columns: slice) -> Array:
        """Return them as they are; blocks of 16 bytes follow each other."""
        packed = self.module.get(self.values)[rows]
        return packed.reshape(len(packed), -1)[:, columns.start // 2 : columns.stop // 2]

    def scales(self, rows: slice, groups: slice) -> Array:
        """Return the powers of two."""
        return powers_of_two(self.module.get(self.scale)[rows, groups])


@dataclass(frozen=True, kw_only=True)
class SignedInt4Weight(CodedWeight):
    """Signed numbers of 4 bits, two to a byte, the first in the low bits: number · scale + zero point.

    Scales and zero points are (groups, out).
    """

    values: str
    scale: str
    zero_point: str

    def codes(self, rows: slice, columns: slice) -> Array:
        """Return them with their sign turned to an offset of 8."""
        packed = self.module.get(self.values)[rows, columns.start // 2 : columns.stop // 2]
        return packed.view(np.uint8) ^ np.uint8(0x88)

    def scales(self, rows: slice, groups: slice) -> Array:
        """Return them output by output."""
        return self.module.get_floats(self.scale, groups, rows).T

    def offsets(self, rows: slice, groups: slice) -> Array | None:
        """Return the negated zero points, which are in the weights' unit."""
        return -self.module.get_floats(self.zero_point, groups, rows).T if self.form.has_offsets else None


MXFP4_GROUP = 32
MXFP4 = WeightForm(code=CodeType.FP4_E2M1, group_size=MXFP4_GROUP)


def grid_of(
    module: StoredModule, part: str, shape: tuple[int, int], form: WeightForm, block: tuple[int, int] | None
) -> ScaleGrid:
    """Return how scales lie: one, one for each output, for each output and group, or for each block.

    Raises CheckpointError if their shape is none of these, for the form that is given.
    """
    num_outputs, num_inputs = shape
    if block is not None:
        expected = (math.ceil(num_outputs / block[0]), math.ceil(num_inputs / block[1]))
        module.check(part, SCALE_DTYPES, expected)
        return ScaleGrid(block[0], block[1] // form.group_size)
    if form.group_size:
        module.check(part, SCALE_DTYPES, (num_outputs, form.num_groups(num_inputs)))
        return ScaleGrid()
    module.check(part, SCALE_DTYPES, (), (1,), (1, 1), (num_outputs,), (num_outputs, 1))
    return ScaleGrid(num_outputs if math.prod(module.parts[part].shape) == 1 else 1)


def static_scale(module: StoredModule, part: str) -> float:
    """Return the scale of activations that a checkpoint states. Raises CheckpointError."""
    module.check(part, SCALE_DTYPES, (), (1,), (1, 1))
    scale = float(module.get_floats(part).reshape(-1)[0])
    if not 0 < scale < math.inf:
        raise module.error(f"has {part} {scale}; it must be a positive number")
    return scale
