"""Cosines and sines of all positions, computed when a step first needs them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sagellm.accel.native.memory import zeroed_pages
from sagellm.accel.rope_scaling import rope_frequencies
from sagellm.core import RopeSpec

_MIN_ROWS = 512


class RopeTable:
    """Tables (positions, rotary_dim / 2) in float32 that stay where they are.

    Memory for all positions is reserved and allocated as sequences grow: 8 bytes for each pair of
    dimensions and position, 20 MiB for 40,960 positions of 128 dimensions.
    """

    def __init__(self, rope: RopeSpec, num_positions: int) -> None:
        frequencies = rope_frequencies(rope)
        self._inv_freq, self._factor = frequencies.inv_freq, frequencies.attention_factor
        shape = (max(1, num_positions), rope.rotary_dim // 2)
        self._cos, self._sin = (_floats(shape) for _ in range(2))
        self._num_ready = 0

    @property
    def addresses(self) -> tuple[int, int]:
        """Where the cosines and the sines are."""
        return self._cos.ctypes.data, self._sin.ctypes.data

    def cover(self, num_positions: int) -> None:
        """Fill the rows of all positions below `num_positions`, and as many again."""
        if num_positions <= self._num_ready:
            return
        assert num_positions <= len(self._cos), "engines refuse sequences longer than the model knows"
        begin, end = self._num_ready, min(len(self._cos), max(_MIN_ROWS, 2 * num_positions))
        angles = np.arange(begin, end, dtype=np.float32)[:, None] * self._inv_freq
        factor = np.float32(self._factor)
        np.multiply(np.cos(angles), factor, out=self._cos[begin:end])
        np.multiply(np.sin(angles), factor, out=self._sin[begin:end])
        self._num_ready = end


def _floats(shape: tuple[int, int]) -> npt.NDArray[np.float32]:
    return zeroed_pages(4 * shape[0] * shape[1]).view(np.float32).reshape(shape)
