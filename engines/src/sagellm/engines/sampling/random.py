"""Uniform random numbers that depend on a seed and a position and on nothing else.

The generator is Philox4x32 with 10 rounds (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC 2011). It is counter-based: there is no state to keep, save or step, so a sequence draws the same
numbers alone, in any batch, and after preemption.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
_ROUNDS = 10
_HALF = np.uint64(32)
_LOW_WORD = np.uint64(0xFFFFFFFF)
_MASK_64 = (1 << 64) - 1


def philox(counters: Words, keys: Words) -> Words:
    """Return four random 32-bit words for each column of counters (4, rows) and keys (2, rows).

    All words are held in uint64; about 60 µs for up to a few hundred rows.
    """
    first, second, third, fourth = counters
    key = keys
    for _ in range(_ROUNDS):
        product_0, product_1 = _MULTIPLIERS * np.stack((first, third))
        first = (product_1 >> _HALF) ^ second ^ key[0]
        second = product_1 & _LOW_WORD
        third = (product_0 >> _HALF) ^ fourth ^ key[1]
        fourth = product_0 & _LOW_WORD
        key = (key + _KEY_STEPS) & _LOW_WORD
    return np.stack((first, second, third, fourth))


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) for each pair of seed and position, with 53 random bits.

    Seeds are taken modulo 2⁶⁴, so negative ones are valid.
    """
    return numbers_of(
        np.array([key_of(seed) for seed in seeds], np.uint64), np.array(positions, dtype=np.uint64)
    )


def key_of(seed: int) -> int:
    """Return a seed modulo 2⁶⁴."""
    return seed & _MASK_64


def numbers_of(keys: Words, positions: Words) -> npt.NDArray[np.float64]:
    """Return what `uniforms` does, for arrays of seeds modulo 2⁶⁴ and positions."""
    nothing = np.zeros_like(positions)
    counters = np.stack((positions & _LOW_WORD, positions >> _HALF, nothing, nothing))
    words = philox(counters, np.stack((keys & _LOW_WORD, keys >> _HALF)))
    bits = ((words[0] >> np.uint64(5)) << np.uint64(26)) | (words[1] >> np.uint64(6))
    uniform: npt.NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return uniform
