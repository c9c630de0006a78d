"""Draws tokens with the compiled library."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import torch

from sagellm.accel.native import structures
from sagellm.accel.native.library import best_or_named

_ALIGNMENT = 64

Words = npt.NDArray[np.uint64]


class NativeDraw:
    """Chooses a token for each row of logits on a CPU, with torch's number of threads.

    Keeps scratch space between calls, so it is not thread-safe. Raises UnsupportedModelError if the library
    does not run here.
    """

    def __init__(self, variant: str | None = None) -> None:
        self._functions = best_or_named(variant).functions
        self._scratch = np.empty(0, np.uint8)
        self._scratch_for = (0, 0)  # a vocabulary and a number of threads
        self._call = structures.Draw()
        self._address = ctypes.addressof(self._call)

    def __call__(self, logits: torch.Tensor, settings: torch.Tensor) -> torch.Tensor:
        """Return a token for each row of logits (rows, vocab) float32, as (rows,) int64.

        `settings` is (rows, 5) float64: temperature (0: the largest logit), min-p, top-k (0: none), 1 - top-p
        (negative: none), and a uniform number in [0, 1). -1 means that no token can be drawn, because a logit
        is NaN or infinite or all are masked. Of equal logits, top-p drops those with the lowest ids first.
        """
        return torch.from_numpy(self.choose(logits, settings.numpy()))

    def choose(
        self,
        logits: torch.Tensor,
        settings: npt.NDArray[np.float64],
        keys: Words | None = None,
        positions: Words | None = None,
    ) -> npt.NDArray[np.int64]:
        """Return what a call returns, from arrays.

        With keys and positions (rows,), the numbers are those of Philox instead of those in `settings`.
        """
        rows, vocab_size = logits.shape
        tokens = np.empty(rows, np.int64)
        if not rows:
            return tokens
        logits, settings = logits.float().contiguous(), np.ascontiguousarray(settings, np.float64)
        call = self._call
        self._make_room(vocab_size, torch.get_num_threads())
        call.num_rows, call.vocab = rows, vocab_size
        call.logits, call.settings, call.tokens = logits.data_ptr(), _address(settings), _address(tokens)
        call.keys = call.positions = None
        if keys is not None and positions is not None:
            keys, positions = np.ascontiguousarray(keys), np.ascontiguousarray(positions)
            call.keys, call.positions = _address(keys), _address(positions)
        self._functions.sage_draw(self._address)
        return tokens

    def _make_room(self, vocab_size: int, num_threads: int) -> None:
        if self._scratch_for == (vocab_size, num_threads):
            return
        needed = self._functions.sage_draw_scratch_bytes(vocab_size, num_threads) + _ALIGNMENT
        if len(self._scratch) < needed:
            self._scratch = np.empty(needed, np.uint8)
        self._call.scratch = -(-_address(self._scratch) // _ALIGNMENT) * _ALIGNMENT
        self._call.num_threads = num_threads
        self._scratch_for = (vocab_size, num_threads)


def _address(array: npt.NDArray[np.generic]) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(array.data))  # in a fifth of the time of `array.ctypes`
