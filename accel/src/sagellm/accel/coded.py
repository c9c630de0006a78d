"""The numbers that codes stand for, and weights that are codes with scales: in plain numpy."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from sagellm.core.protocols.weight_form import CodedRows, CodeType, WeightForm

Floats = npt.NDArray[np.float32]


@cache
def numbers_of(code: CodeType) -> Floats:
    """Return the numbers of all codes, 16 or 256 of them, by the code as an unsigned integer."""
    codes = np.arange(1 << code.bits)
    if code is CodeType.INT4:
        return (codes - 8).astype(np.float32)
    if code is CodeType.UINT4:
        return codes.astype(np.float32)
    if code in (CodeType.INT6, CodeType.INT8):
        return codes.astype(np.uint8).view(np.int8).astype(np.float32)
    exponent_bits, mantissa_bits, bias = {
        CodeType.FP8_E4M3: (4, 3, 7),
        CodeType.FP8_E5M2: (5, 2, 15),
        CodeType.FP4_E2M1: (2, 1, 1),
    }[code]
    mantissa = codes & ((1 << mantissa_bits) - 1)
    exponent = codes >> mantissa_bits & ((1 << exponent_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits)
    sizes = np.where(
        exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - float(bias))
    )
    if code is CodeType.FP8_E4M3:
        sizes[(codes & 0x7F) == 0x7F] = np.nan
    if code is CodeType.FP8_E5M2:
        special = exponent == (1 << exponent_bits) - 1
        sizes[special] = np.where(mantissa == 0, np.inf, np.nan)[special]
    signs = 1 - 2 * (codes >> (code.bits - 1))
    return (signs * sizes).astype(np.float32)


def expand(rows: CodedRows, form: WeightForm, order: npt.NDArray[np.int64] | None = None) -> Floats:
    """Return the weights (rows, in) that codes stand for, inputs in their own order."""
    codes = rows.codes.view(np.uint8)
    if form.code.bits == 4:
        both = np.empty((*codes.shape, 2), np.uint8)
        np.bitwise_and(codes, 15, out=both[..., 0])
        np.right_shift(codes, 4, out=both[..., 1])
        codes = both.reshape(len(codes), -1)
    weights = np.reshape(numbers_of(form.code)[codes], (len(codes), rows.scales.shape[1], -1))
    if rows.zeros is not None:
        weights -= rows.zeros[..., None].astype(np.float32)
    weights *= rows.whole_scales()[..., None].astype(np.float32)
    offsets = rows.whole_offsets()
    if offsets is not None:
        weights -= offsets[..., None].astype(np.float32)
    whole = weights.reshape(codes.shape)
    return whole if order is None else np.take(whole, np.argsort(order), axis=1)
