"""What the stored codes of a quantized weight stand for, whatever file they come from."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class CodeType(StrEnum):
    """The number that a code stands for. Codes of 4 bits lie two to a byte, the first in the low bits."""

    INT4 = "int4"  # a nibble u is u - 8
    UINT4 = "uint4"  # 0 … 15
    INT6 = "int6"  # -32 … 31, in a byte; a backend may hold six bits
    INT8 = "int8"
    FP8_E4M3 = "fp8_e4m3"  # without infinities, as in OCP's 8-bit formats; largest 448
    FP8_E5M2 = "fp8_e5m2"
    FP4_E2M1 = "fp4_e2m1"  # sign, two bits of exponent, one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 4 if self in (CodeType.INT4, CodeType.UINT4, CodeType.FP4_E2M1) else 8


@dataclass(frozen=True, kw_only=True)
class ActivationForm:
    """What activations are rounded to before a product, symmetrically: INT8 or FP8_E4M3.

    The scale is max|x| ÷ 127 or 448 of each token, or of each `group_size` inputs of it; or `scale`, known
    before.
    """

    code: CodeType
    group_size: int = 0  # inputs that share a scale; 0: all of a token
    scale: float | None = None


@dataclass(frozen=True, kw_only=True)
class WeightForm:
    """weight[o, i] = (number - zeros[o, g]) · scales[o, g] - offsets[o, g], where g = i // group_size.

    Computed in float32 and rounded once, to the model's dtype. With `has_order` the codes of a row are those
    of other inputs: column j belongs to input `order[j]` (GPTQ's act order). With a `scale_group` scales and
    offsets are small integers, each times a factor that so many inputs share (GGUF's K types).
    """

    code: CodeType
    group_size: int = 0  # inputs that share a scale; 0: all of an output
    scale_group: int = 0  # a multiple of `group_size`; 0: scales have no factors
    has_zeros: bool = False
    has_offsets: bool = False
    has_order: bool = False
    activations: ActivationForm | None = None  # None: as they are

    def num_groups(self, num_inputs: int) -> int:
        """Return how many scales an output has."""
        return num_inputs // self.group_size if self.group_size else 1


@dataclass(frozen=True, kw_only=True)
class CodedRows:
    """Some outputs of a quantized weight, (rows, in): contiguous arrays, or views of the file.

    `codes` is uint8, or int8 for INT6 and INT8; of 4 bits (rows, in ÷ 2). `scales` and `offsets` are
    (rows, groups) in float32 or float16; a reader that has them in another format converts them to float32.
    `zeros` is (rows, groups) in int8, in the numbers' unit. With a `scale_group` scales and offsets are int8,
    and their factors (rows, scale groups) in float16.
    """

    codes: npt.NDArray[np.generic]
    scales: npt.NDArray[np.generic]
    zeros: npt.NDArray[np.generic] | None = None
    offsets: npt.NDArray[np.generic] | None = None
    factors: npt.NDArray[np.generic] | None = None
    offset_factors: npt.NDArray[np.generic] | None = None

    def __getitem__(self, rows: slice) -> CodedRows:
        """Return some of these rows."""
        arrays = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: each[rows] for name, each in arrays.items() if each is not None})

    def whole_scales(self) -> npt.NDArray[np.generic]:
        """Return the scales times their factors, which float32 holds exactly; without factors as they are."""
        return _times(self.scales, self.factors)

    def whole_offsets(self) -> npt.NDArray[np.generic] | None:
        """Return the offsets likewise."""
        return None if self.offsets is None else _times(self.offsets, self.offset_factors)


def _times(
    values: npt.NDArray[np.generic], factors: npt.NDArray[np.generic] | None
) -> npt.NDArray[np.generic]:
    if factors is None:
        return values
    # By methods: numpy is imported for types alone.
    parts = values.reshape(*factors.shape, -1).astype("f4")
    whole: npt.NDArray[np.generic] = (parts * factors.astype("f4")[..., None]).reshape(values.shape)
    return whole
