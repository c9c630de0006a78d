"""The types of ggml's tensors, and how the blocks of quantized ones become codes, scales and offsets.

A row is a sequence of blocks, each with its scales before or behind its codes. Source: ggml-common.h and
ggml-quants.c of llama.cpp. What a block stands for is computed in float32, as there:

    Q8_0  d·q              Q4_0  d·(u - 8)       Q4_1  d·u + m
    Q5_0  d·(u - 16)       Q5_1  d·u + m         Q6_K  (d·s)·(u - 32)
    Q4_K, Q5_K  (d·s)·u - (dmin·m), s and m of 6 bits
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from sagellm.accel.threads import num_threads
from sagellm.core.protocols.weight_form import CodedRows, CodeType, WeightForm

TYPES = {
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K"},
    **{11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS"},
    **{18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16"},
    **{26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"},
    **{40: "NVFP4", 41: "Q1_0"},
}
BLOCKS = {
    **{"F32": (1, 4), "F16": (1, 2), "BF16": (1, 2)},
    **{"Q8_0": (32, 34), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24)},
    **{"Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210)},
}
"""How many weights a block has, and how many bytes, by the types that are read."""
READ = tuple(BLOCKS)
_Bytes = npt.NDArray[np.uint8]
_BYTES_AT_ONCE = 256 << 10  # of blocks, so that what they become stays in a core's cache


@dataclass(frozen=True)
class BlockType:
    """What quantized rows become, and the function that takes their blocks apart, (rows, blocks, bytes)."""

    form: WeightForm
    unpack: Callable[[_Bytes], CodedRows]


def _copy(part: _Bytes) -> _Bytes:
    """Return a part of each block in one piece; numpy copies an item of many bytes at once."""
    num_bytes = part.shape[-1]
    return np.ascontiguousarray(part.view(f"V{num_bytes}")).view(np.uint8).reshape(part.shape)


def _pairs(codes: _Bytes) -> _Bytes:
    """Return bytes (…, 2, n ÷ 2) of neighbouring codes: those of all low bits of n bytes, then of all high.

    A canonical byte has codes 2k and 2k + 1; a stored one has k and k + n.
    """
    words, num_bytes = _copy(codes).view("<u8"), codes.shape[-1]
    pairs = np.empty((codes.size // num_bytes, 2), f"V{num_bytes // 2}")
    for half in range(2):
        nibbles = words >> 4 * half & 0x0F0F0F0F0F0F0F0F
        nibbles |= nibbles >> 4  # every other byte has a nibble, and that of the byte behind it
        pairs[:, half] = nibbles.view(np.uint8).reshape(-1)[::2].copy().view(pairs.dtype)
    return pairs.view(np.uint8).reshape(*codes.shape[:-1], 2, num_bytes // 2)


def _nibbles(codes: _Bytes) -> _Bytes:
    """Return codes (…, 2, n) of n bytes: all low bits, then all high."""
    both = np.empty((*codes.shape[:-1], 2, codes.shape[-1]), np.uint8)
    np.bitwise_and(codes, 15, out=both[..., 0, :])
    np.right_shift(codes, 4, out=both[..., 1, :])
    return both


def _half(blocks: _Bytes, at: int) -> npt.NDArray[np.float16]:
    """Return the float16 at a byte of each block, (rows, blocks)."""
    return np.ascontiguousarray(blocks[..., at : at + 2].view("<f2")[..., 0])


def _flat(array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """Return (rows, …) as (rows, all)."""
    return array.reshape(len(array), -1)


def _unpack_q8_0(blocks: _Bytes) -> CodedRows:
    return CodedRows(codes=_flat(_copy(blocks[..., 2:])).view(np.int8), scales=_half(blocks, 0))


def _unpack_q4_0(blocks: _Bytes) -> CodedRows:
    return CodedRows(codes=_flat(_pairs(blocks[..., 2:])), scales=_half(blocks, 0))


def _unpack_q4_1(blocks: _Bytes) -> CodedRows:
    codes = _flat(_pairs(blocks[..., 4:]))
    return CodedRows(codes=codes, scales=_half(blocks, 0), offsets=-_half(blocks, 2))


def _fifth_bits(blocks: _Bytes, at: int) -> _Bytes:
    """Return 16 or 0 for each of the 32 codes of a block."""
    bits = np.unpackbits(blocks[..., at : at + 4], axis=-1, bitorder="little")
    return np.left_shift(bits, 4, out=bits)


def _unpack_q5_0(blocks: _Bytes) -> CodedRows:
    codes = _nibbles(blocks[..., 6:]).reshape(*blocks.shape[:-1], 32) | _fifth_bits(blocks, 2)
    return CodedRows(codes=_flat(codes.view(np.int8) - np.int8(16)), scales=_half(blocks, 0))


def _unpack_q5_1(blocks: _Bytes) -> CodedRows:
    codes = _nibbles(blocks[..., 8:]).reshape(*blocks.shape[:-1], 32) | _fifth_bits(blocks, 4)
    return CodedRows(codes=_flat(codes).view(np.int8), scales=_half(blocks, 0), offsets=-_half(blocks, 2))


def _with_minima(codes: npt.NDArray[np.generic], blocks: _Bytes) -> CodedRows:
    """Return codes with the scale and what is subtracted of each 32 codes of Q4_K or Q5_K.

    Of 12 bytes the first four have scales 0 to 3, the next minima 0 to 3, in six bits; their two high bits
    belong to scales and minima 4 to 7, whose low four are the nibbles of the last four bytes.
    """
    first, second, third = (blocks[..., at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate((first & 63, third & 15 | first >> 2 & 48), axis=-1)
    minima = np.concatenate((second & 63, third >> 4 | second >> 2 & 48), axis=-1)
    return CodedRows(
        codes=_flat(codes),
        scales=_flat(scales).view(np.int8),
        offsets=_flat(minima).view(np.int8),
        factors=_half(blocks, 0),
        offset_factors=_half(blocks, 2),
    )


def _unpack_q4_k(blocks: _Bytes) -> CodedRows:
    return _with_minima(_pairs(blocks[..., 16:].reshape(*blocks.shape[:-1], 4, 32)), blocks)


def _unpack_q5_k(blocks: _Bytes) -> CodedRows:
    codes = _nibbles(blocks[..., 48:].reshape(*blocks.shape[:-1], 4, 32)).reshape(*blocks.shape[:-1], 8, 32)
    # Bit g of byte j is the fifth of code j of group g.
    high = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return _with_minima((codes | high << 4).view(np.int8), blocks)


def _unpack_q6_k(blocks: _Bytes) -> CodedRows:
    low = _nibbles(blocks[..., :128].reshape(*blocks.shape[:-1], 2, 64)).reshape(*blocks.shape[:-1], 2, 4, 32)
    high = blocks[..., 128:192].reshape(*blocks.shape[:-1], 2, 1, 32)
    high = (high >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3).astype(np.uint8)
    codes = (low | high << 4).view(np.int8) - np.int8(32)
    scales = _flat(_copy(blocks[..., 192:208])).view(np.int8)
    return CodedRows(codes=_flat(codes), scales=scales, factors=_half(blocks, 208))


_INT4 = WeightForm(code=CodeType.INT4, group_size=32)
_UINT4 = WeightForm(code=CodeType.UINT4, group_size=32, has_offsets=True)
_INT8 = WeightForm(code=CodeType.INT8, group_size=32)
BLOCK_TYPES = {
    "Q8_0": BlockType(_INT8, _unpack_q8_0),
    "Q4_0": BlockType(_INT4, _unpack_q4_0),
    "Q4_1": BlockType(_UINT4, _unpack_q4_1),
    "Q5_0": BlockType(_INT8, _unpack_q5_0),
    "Q5_1": BlockType(replace(_INT8, has_offsets=True), _unpack_q5_1),
    "Q4_K": BlockType(replace(_UINT4, scale_group=256), _unpack_q4_k),
    "Q5_K": BlockType(replace(_INT8, scale_group=256, has_offsets=True), _unpack_q5_k),
    "Q6_K": BlockType(WeightForm(code=CodeType.INT6, group_size=16, scale_group=256), _unpack_q6_k),
}


def coded_rows(kind: str, blocks: _Bytes) -> CodedRows:
    """Take rows of blocks, (rows, blocks, bytes), apart, a few at a time on all threads."""
    unpack = BLOCK_TYPES[kind].unpack
    at_once = max(1, _BYTES_AT_ONCE * len(blocks) // max(1, blocks.nbytes))
    if at_once >= len(blocks):
        return unpack(blocks)
    first = unpack(blocks[:1])
    parts = {field.name: getattr(first, field.name) for field in fields(CodedRows)}
    arrays = {
        name: np.empty((len(blocks), *part.shape[1:]), part.dtype)
        for name, part in parts.items()
        if part is not None
    }

    def fill(begin: int) -> None:
        rows = unpack(blocks[begin : begin + at_once])
        for name, array in arrays.items():
            array[begin : begin + at_once] = getattr(rows, name)

    with ThreadPoolExecutor(num_threads()) as pool:
        list(pool.map(fill, range(0, len(blocks), at_once)))
    return replace(first, **arrays)
