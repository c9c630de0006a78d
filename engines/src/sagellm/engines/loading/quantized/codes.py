"""Stored bits rearranged to codes as a `WeightForm` has them, piece by piece, in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


def nibbles_of(packed: Bytes) -> Bytes:
    """Return the codes (rows, 2n) of bytes (rows, n), the low bits first."""
    both = np.empty((*packed.shape, 2), np.uint8)
    np.bitwise_and(packed, 15, out=both[..., 0])
    np.right_shift(packed, 4, out=both[..., 1])
    return both.reshape(len(packed), -1)


def packed_nibbles(codes: Bytes) -> Bytes:
    """Return bytes (rows, n) of codes (rows, 2n) below 16."""
    packed = codes[:, 1::2] << np.uint8(4)
    packed |= codes[:, ::2]
    return packed


def signed(codes: Bytes) -> npt.NDArray[np.int8]:
    """Return bytes u as the numbers u - 128."""
    return (codes ^ 0x80).view(np.int8)


def taken(codes: Array, bits: int, columns: npt.NDArray[np.int64]) -> Array:
    """Return the codes of some columns, in this order. Codes of 4 bits lie two to a byte."""
    if bits == 8:
        return np.take(codes, columns, axis=1)
    return packed_nibbles(np.take(nibbles_of(codes), columns, axis=1))


def floats(values: Array, dtype: str) -> Array:
    """Return stored numbers as float16 or float32, whichever holds them; float32 and float16 as views."""
    if dtype == "BF16":
        wide = values.astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    return values


def powers_of_two(exponents: Bytes) -> npt.NDArray[np.float32]:
    """Return the numbers of E8M0 codes, 2 to the power of code - 127; 255 is NaN."""
    return _POWERS[exponents]


def _powers() -> npt.NDArray[np.float32]:
    powers = np.ldexp(np.float64(1), np.arange(256) - 127)
    powers[255] = np.nan
    return powers.astype(np.float32)  # the smallest is subnormal, and exact


_POWERS = _powers()
