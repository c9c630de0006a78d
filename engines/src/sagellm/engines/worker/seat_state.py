"""What a worker knows about the sequences in its seats."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sagellm.core import StepInput
from sagellm.core.protocols.step import BlockUpdates, SeatArrival
from sagellm.engines.sampling.rows import LogitsStates

Ints = npt.NDArray[np.int32]
FIRST_TOKENS = 4096
"""Tokens per sequence that tables have room for at first."""

_MAX_FIRST_TOKENS = 8 << 20
"""The same for all seats together: 32 MiB."""


def first_tables(num_seats: int, block_size: int, num_groups: int) -> tuple[Ints, Ints]:
    """Return empty tables, of blocks (groups, seats, width) and of tokens (seats, width · block_size + 1).

    They are written to here: the system clears memory when it is first written to, 2 MiB at a time for large
    arrays, which would take milliseconds of the step that admits a sequence.
    """
    width = max(1, min(FIRST_TOKENS, _MAX_FIRST_TOKENS // max(1, num_seats)) // block_size)
    tables: Ints = np.empty((num_groups, num_seats, width), np.int32)
    tokens: Ints = np.empty((num_seats, width * block_size + 1), np.int32)
    for each in (tables, tokens):
        each.fill(0)
    return tables, tokens


def widened_tables(tables: Ints, tokens: Ints, lengths: Ints, num_blocks: int) -> tuple[Ints, Ints]:
    """Return tables with room for sequences of this many blocks, and their next token.

    Only what is in use is copied: the first `lengths` (seats,) blocks of each seat, and the tokens in them.
    """
    num_groups, num_seats, before = tables.shape
    block_size, width = (tokens.shape[1] - 1) // before, max(num_blocks, 2 * before)
    wide_tables = np.zeros((num_groups, num_seats, width), np.int32)
    wide_tokens = np.zeros((num_seats, width * block_size + 1), np.int32)
    for seat in np.flatnonzero(lengths).tolist():
        end = int(lengths[seat])
        wide_tables[:, seat, :end] = tables[:, seat, :end]
        wide_tokens[seat, : end * block_size + 1] = tokens[seat, : end * block_size + 1]
    return wide_tables, wide_tokens


class SeatState:
    """Tokens, a block table for each KV group, and sampling parameters, by seat.

    Tables widen with the longest sequence, to memory that is not touched before a sequence reaches it. Data
    left by a seat's last occupant is overwritten as the next one grows, and never read before that.
    """

    def __init__(self, num_seats: int, *, block_size: int, num_groups: int = 1) -> None:
        self.tables, self.tokens = first_tables(num_seats, block_size, num_groups)
        self.generation = np.zeros(
            num_seats, np.int64
        )  # of the occupant: what an earlier one drew is not its
        self._num_blocks = np.zeros(num_seats, np.int32)  # of the group that has most
        self.logits_states: list[LogitsStates | None] = [None] * num_seats  # None until first sampled
        self._arrivals: list[SeatArrival | None] = [None] * num_seats

    def __getitem__(self, seat: int) -> SeatArrival:
        arrival = self._arrivals[seat]
        assert arrival is not None, f"seat {seat} is taken"
        return arrival

    def update(self, step: StepInput) -> None:
        """Apply a step's departures, arrivals, drafts and block updates."""
        for seat in step.departures:
            self._arrivals[seat] = self.logits_states[seat] = None
            self._num_blocks[seat] = 0
        for arrival in step.arrivals:
            self._num_blocks[arrival.seat] = 0
        if step.new_blocks is not None:
            self._widen(int(step.new_blocks.indices.max()) + 1)
        for arrival in step.arrivals:
            self._take_in(arrival)
        if step.new_blocks is not None:
            self._set_blocks(step.new_blocks)
        if step.drafts is not None:
            counts = step.drafts.counts
            places = np.repeat(step.starts + step.num_new - counts.cumsum(), counts)
            places += np.arange(len(places), dtype=places.dtype)
            self.tokens[np.repeat(step.seats, counts), places] = step.drafts.ids

    def output_before(self, seat: int, position: int) -> Sequence[int]:
        """Return a copy of a sequence's output tokens before a position."""
        return array("i", self.tokens[seat, self[seat].num_prompt : position].tobytes())

    def _take_in(self, arrival: SeatArrival) -> None:
        seat = arrival.seat
        self._arrivals[seat], self.logits_states[seat] = arrival, None
        self.generation[seat] += 1
        self.tokens[seat, : len(arrival.token_ids)] = np.frombuffer(arrival.token_ids.data, np.int32)

    def _set_blocks(self, updates: BlockUpdates) -> None:
        self.tables[updates.groups, updates.seats, updates.indices] = updates.block_ids
        np.maximum.at(self._num_blocks, updates.seats, updates.indices + 1)

    def _widen(self, num_blocks: int) -> None:
        if num_blocks > self.tables.shape[2]:
            self.tables, self.tokens = widened_tables(self.tables, self.tokens, self._num_blocks, num_blocks)
