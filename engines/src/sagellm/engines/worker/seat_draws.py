"""How the sequences in the seats draw their tokens, as columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sagellm.core import StepInput
from sagellm.engines.sampling.draws import filters_of
from sagellm.engines.sampling.random import key_of
from sagellm.engines.sampling.rows import LogitsStates
from sagellm.engines.worker.seat_state import SeatState

Seats = npt.NDArray[np.int32]


class RowSettings(NamedTuple):
    """How the rows of a step draw."""

    filters: npt.NDArray[np.float64]  # (rows, 5): `Filters`, and room for a number
    keys: npt.NDArray[np.uint64]  # (rows,) of the random numbers
    positions: npt.NDArray[np.uint64]  # (rows,) of the tokens in their outputs


class SeatDraws:
    """The settings of each seat, read once for each sequence that takes it.

    Rows that a kernel can draw ask for nothing but a token: no drafts, log-probabilities, penalties or logits
    processors. `start_processors` is called for a seat's new sequence and returns the states of those that it
    has.
    """

    def __init__(self, state: SeatState, start_processors: Callable[[int], LogitsStates]) -> None:
        num_seats = len(state.generation)
        self._state, self._start_processors = state, start_processors
        self._generation = np.full(num_seats, -1, np.int64)  # for which these hold:
        self._is_plain = np.zeros(num_seats, np.bool_)
        self._filters = np.zeros((num_seats, 5))
        self._keys = np.zeros(num_seats, np.uint64)
        self._num_prompt = np.zeros(num_seats, np.int32)

    def can_draw(self, step: StepInput, seats: Seats) -> bool:
        """Say whether a kernel can draw the tokens of these sampled seats of a step."""
        if step.drafts is not None or step.scored:
            return False
        is_new = self._generation.take(seats) != self._state.generation.take(seats)
        if np.count_nonzero(is_new):
            for seat in seats[is_new].tolist():
                self._learn(seat)
        return bool(np.count_nonzero(self._is_plain.take(seats)) == len(seats))

    def settings(self, seats: Seats, positions: npt.NDArray[np.int32]) -> RowSettings:
        """Return the settings of rows; `positions` are those of the tokens they draw, in their sequences."""
        in_output = positions - self._num_prompt.take(seats)
        return RowSettings(self._filters.take(seats, 0), self._keys.take(seats), in_output.astype(np.uint64))

    def _learn(self, seat: int) -> None:
        arrival = self._state[seat]
        params = arrival.params
        self._is_plain[seat] = not (
            self._start_processors(seat) or params.has_penalties or params.logprobs is not None
        )
        self._filters[seat, :4] = filters_of(params)
        self._keys[seat], self._num_prompt[seat] = key_of(arrival.seed), arrival.num_prompt
        self._generation[seat] = self._state.generation[seat]
