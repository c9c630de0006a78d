"""Draws tokens with the compiled library."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from sagellm.accel.native import structures
from sagellm.accel.native.library import best_or_named
from sagellm.accel.threads import num_threads

if TYPE_CHECKING:
    import torch

_ALIGNMENT = 64

Ints = npt.NDArray[np.int32]
Words = npt.NDArray[np.uint64]


class RowDetails(Protocol):
    """What some rows of a draw ask for beside a token; None: no row does."""

    @property
    def places(self) -> Ints | None:
        """Which row of the logits each row draws from, (rows,); None: one after the other."""

    @property
    def replaced(self) -> npt.NDArray[np.float32] | None:
        """Logits to draw from instead (any, vocab), contiguous."""

    @property
    def replaced_rows(self) -> Ints:
        """Which of those a row has (rows,); -1: its own."""

    @property
    def masks(self) -> npt.NDArray[np.uint32] | None:
        """Tokens that may be drawn (any, ceil(vocab / 32)): bit t % 32 of word t // 32."""

    @property
    def mask_rows(self) -> Ints:
        """Which of those a row has (rows,); -1: none."""

    @property
    def edits(self) -> npt.NDArray[np.void] | None:
        """Changes of single logits, one after the other: records of token, factor and addend.

        A negative logit is multiplied by the factor and another is divided by it; then the addend is added.
        -inf forbids the token.
        """

    @property
    def edit_offsets(self) -> npt.NDArray[np.int64]:
        """Where the edits of each row begin (rows + 1,)."""

    @property
    def num_top(self) -> Ints | None:
        """Of how many of the likeliest tokens log-probabilities are wanted (rows,); -1: of none at all."""

    @property
    def logprobs(self) -> npt.NDArray[np.float64]:
        """Where they are written (rows, 2 + 2 · most): the token's, its rank, the likeliest, their ids."""


class NativeDraw:
    """Chooses a token for each row of logits on a CPU, with torch's number of threads.

    Keeps scratch space between calls, so it is not thread-safe. Raises UnsupportedModelError if the library
    does not run here.
    """

    def __init__(self, variant: str | None = None) -> None:
        self._functions = best_or_named(variant).functions
        self._scratch = np.empty(0, np.uint8)
        self._scratch_for = (0, 0)  # a vocabulary and a number of threads
        self._call, self._detailed_call = structures.Draw(), structures.Draw()

    def __call__(self, logits: torch.Tensor, settings: torch.Tensor) -> torch.Tensor:
        """Return a token for each row of logits (rows, vocab) float32, as (rows,) int64.

        `settings` is (rows, 5) float64: temperature (0: the largest logit), min-p, top-k (0: none), 1 - top-p
        (negative: none), and a uniform number in [0, 1). -1 means that no token can be drawn, because a logit
        is NaN or infinite or all are masked. Of equal logits, top-p drops those with the lowest ids first.
        """
        import torch

        return torch.from_numpy(self.choose(logits, settings.numpy()))

    def choose(
        self,
        logits: npt.NDArray[np.float32] | torch.Tensor,
        settings: npt.NDArray[np.float64],
        keys: Words | None = None,
        positions: Words | None = None,
        details: RowDetails | None = None,
    ) -> npt.NDArray[np.int64]:
        """Return what a call returns, from arrays; logits may also be a tensor on the CPU.

        With keys and positions (rows,), the numbers are those of Philox instead of those in `settings`.
        Details cost the rows that have them; the logits stay as they are.
        """
        rows, vocab_size = len(settings), logits.shape[1]
        tokens = np.empty(rows, np.int64)
        if not rows:
            return tokens
        scores = np.ascontiguousarray(logits if isinstance(logits, np.ndarray) else logits.float().numpy())
        assert scores.dtype == np.float32, "backends return float32"
        settings = np.ascontiguousarray(settings, np.float64)
        call = self._call if details is None else self._detailed_call
        self._make_room(vocab_size, num_threads())
        call.num_rows, call.vocab = rows, vocab_size
        call.logits, call.settings, call.tokens = scores.ctypes.data, _address(settings), _address(tokens)
        call.keys = call.positions = None
        if keys is not None and positions is not None:
            keys, positions = np.ascontiguousarray(keys), np.ascontiguousarray(positions)
            call.keys, call.positions = _address(keys), _address(positions)
        if details is not None:
            _add_details(call, details)
        self._functions.sage_draw(ctypes.addressof(call))
        return tokens

    def _make_room(self, vocab_size: int, num_threads: int) -> None:
        if self._scratch_for == (vocab_size, num_threads):
            return
        needed = self._functions.sage_draw_scratch_bytes(vocab_size, num_threads) + _ALIGNMENT
        if len(self._scratch) < needed:
            self._scratch = np.empty(needed, np.uint8)
        start = -(-_address(self._scratch) // _ALIGNMENT) * _ALIGNMENT
        for call in (self._call, self._detailed_call):
            call.scratch, call.num_threads = start, num_threads
        self._scratch_for = (vocab_size, num_threads)


def _add_details(call: structures.Draw, details: RowDetails) -> None:
    call.places = None if details.places is None else _address(details.places)
    call.replaced = call.replaced_rows = call.masks = call.mask_rows = None
    if details.replaced is not None:
        call.replaced, call.replaced_rows = _address(details.replaced), _address(details.replaced_rows)
    if details.masks is not None:
        call.masks = details.masks.ctypes.data  # they may be read-only
        call.mask_rows = _address(details.mask_rows)
    call.edits = call.edit_offsets = call.num_top = call.logprobs = None
    if details.edits is not None and len(details.edits):
        call.edits, call.edit_offsets = _address(details.edits), _address(details.edit_offsets)
    if details.num_top is not None:
        call.num_top, call.logprobs = _address(details.num_top), _address(details.logprobs)
        call.most_top = (details.logprobs.shape[1] - 2) // 2


def _address(array: npt.NDArray[np.generic]) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(array.data))  # in a fifth of the time of `array.ctypes`
