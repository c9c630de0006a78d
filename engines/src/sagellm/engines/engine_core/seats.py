"""The running sequences as columns: each has one row, its seat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sagellm.core import BlockId, TokenIds
from sagellm.core.protocols.request_rows import CHANGING_COLUMNS, SCHEDULE_COLUMNS
from sagellm.core.protocols.step import BlockUpdates, Seat, SeatArrival
from sagellm.engines.worker.seat_state import first_tables, widened_tables

if TYPE_CHECKING:
    from sagellm.engines.engine_core.sequence import Sequence

Ints = npt.NDArray[np.int32]
Places = npt.NDArray[np.intp]  # indices in a type that numpy need not convert
_MOST = (1 << 31) - 1

NUM_STOPS = 8
"""Stop tokens per sequence that are compared as columns; a sequence with more is checked individually."""


_FIXED = {name: dtype for name, dtype in SCHEDULE_COLUMNS.items() if name not in CHANGING_COLUMNS}
_FIXED["predicted_tokens"] = "f4"  # of the whole output, as predicted last; NaN if unknown


class RemainingColumns(dict[str, npt.NDArray[Any]]):
    """Columns in which the predicted remaining tokens are computed if somebody reads them."""

    def __missing__(self, name: str) -> npt.NDArray[Any]:
        if name != "predicted_remaining_tokens":
            raise KeyError(name)
        num_generated = self["num_tokens"] - self["num_prompt_tokens"]
        remaining: npt.NDArray[Any] = np.maximum(self["predicted_tokens"] - num_generated, 1)
        return remaining.astype(np.float32)


class ScheduleColumns:
    """Everything but the counts, which change: one row per seat, or per waiting sequence."""

    def __init__(self, num_rows: int = 0) -> None:
        self.arrays: dict[str, npt.NDArray[Any]] = {
            name: np.zeros(num_rows, dtype) for name, dtype in _FIXED.items()
        }

    def put(self, row: int, sequence: Sequence) -> None:
        """Fill a row."""
        request, arrays = sequence.request, self.arrays
        tenant, predicted = request.tenant, sequence.predicted_tokens
        arrays["priority"][row] = request.priority
        arrays["arrived_time"][row] = request.arrival_ns / 1e9
        arrays["num_prompt_tokens"][row] = len(request.token_ids)
        arrays["predicted_tokens"][row] = np.nan if predicted is None else predicted
        arrays["confidence"][row] = sequence.confidence or 0.0
        arrays["max_tokens"][row] = request.max_tokens
        arrays["deadline"][row] = np.inf if request.deadline_ns is None else request.deadline_ns / 1e9
        arrays["tenant"][row] = tenant.code
        arrays["weight"][row] = tenant.weight
        arrays["is_trusted"][row] = tenant.is_trusted
        arrays["key"][row] = sequence.key

    def grow(self, num_rows: int) -> None:
        """Append empty rows."""
        for name, array in self.arrays.items():
            self.arrays[name] = np.concatenate((array, np.zeros(num_rows - len(array), array.dtype)))


class Seats:
    """All counts of running sequences, by seat; they are stored nowhere else.

        0 ──────── cached ──────── committed ──────── computed ──────── tokens ──────── in flight
          shared, locked    ours, collected    ours, in flight    known, no KV    not drawn yet

    `num_computed` counts what has been submitted, `num_committed` what has been collected; they are equal
    while no step is in flight. There is a block table for each KV group, all of one block size. They are
    written when a sequence grows, and never rebuilt.
    `generation` changes when a sequence leaves, so that results collected for it later are recognized as
    stale.
    """

    def __init__(self, num_seats: int, *, block_size: int, num_groups: int = 1) -> None:
        """Create empty seats. Their tables widen with the longest sequence."""
        self.block_size = block_size
        self.num_tokens: Ints = np.zeros(num_seats, np.int32)  # known: prompt and output
        self.num_computed: Ints = np.zeros(num_seats, np.int32)
        self.num_committed: Ints = np.zeros(num_seats, np.int32)
        self.num_in_flight: Ints = np.zeros(num_seats, np.int32)  # tokens that submitted steps draw at least
        self.lengths: Ints = np.zeros((num_groups, num_seats), np.int32)  # blocks in the tables
        self.num_blocks: Ints = self.lengths[0]
        self.max_total: Ints = np.zeros(num_seats, np.int32)  # tokens at which a sequence ends
        self.max_computed: Ints = np.zeros(num_seats, np.int32)  # one less: the last token is never computed
        self.min_total: Ints = np.zeros(num_seats, np.int32)  # tokens up to which no stop token counts
        self.schedule_columns = ScheduleColumns(num_seats)
        self.num_prompt: Ints = self.schedule_columns.arrays["num_prompt_tokens"]
        self.last_step: npt.NDArray[np.int64] = np.zeros(num_seats, np.int64)  # in which it was scheduled
        self.generation: Ints = np.zeros(num_seats, np.int32)
        self.ask_at: Ints = np.full(num_seats, _MOST, np.int32)  # tokens at which to predict once more
        self.is_held = np.zeros(num_seats, np.bool_)  # drafts are in flight: what follows is not known
        self.scored: set[int] = set()  # seats of which log-probabilities of the prompt are still wanted
        self.with_many_stops: set[int] = set()
        self.structured: set[int] = set()  # seats whose output must match a grammar
        self.with_hidden: set[int] = set()  # seats whose hidden states are wanted
        self.stops: Ints = np.full((num_seats, NUM_STOPS), -1, np.int32)
        self.tables, self.tokens = first_tables(num_seats, block_size, num_groups)
        self.sequences: npt.NDArray[np.object_] = np.full(num_seats, None)
        self.sequence_ids: npt.NDArray[np.object_] = np.full(num_seats, None)
        self._free = list(range(num_seats - 1, -1, -1))
        self._arrivals: dict[Seat, SeatArrival] = {}  # since the last step, like `_departures` and `_updates`
        self._departures: list[Seat] = []
        self._updates: list[tuple[int, int, int, int]] = []  # group, seat, first index, end
        self._entries: list[tuple[Ints, Ints, Ints]] = []  # groups, seats and indices of single blocks

    @property
    def num_free(self) -> int:
        """Unoccupied seats."""
        return len(self._free)

    def take(self, sequence: Sequence, tokens: TokenIds, block_ids: Seq[BlockId], num_computed: int) -> Seat:
        """Seat a sequence with its tokens so far and its blocks of the first KV group.

        Its first `num_computed` tokens have KV.
        """
        seat, request, params = Seat(self._free.pop()), sequence.request, sequence.params
        num_prompt, num_tokens = len(request.token_ids), len(tokens)
        num_blocks, stops = len(block_ids), sorted(sequence.stop_token_ids)
        self.num_tokens[seat] = num_tokens
        self.num_computed[seat] = self.num_committed[seat] = num_computed
        self.num_in_flight[seat] = 0
        self.max_total[seat] = num_prompt + sequence.max_output_tokens
        self.max_computed[seat] = self.max_total[seat] - 1
        self.min_total[seat] = min(num_prompt + params.min_tokens, _MOST)
        self.schedule_columns.put(seat, sequence)
        self.last_step[seat] = -1
        predicted = sequence.predicted_tokens
        self.ask_at[seat] = _MOST if predicted is None else min(num_prompt + int(predicted) + 1, _MOST)
        self.is_held[seat] = False
        if len(stops) > NUM_STOPS:
            self.with_many_stops.add(seat)
        if sequence.num_scored < sequence.num_to_score:
            self.scored.add(seat)
        if sequence.grammar is not None:
            self.structured.add(seat)
        if params.return_hidden_states:
            self.with_hidden.add(seat)
        self.stops[seat] = -1
        if stops:
            self.stops[seat, : len(stops[:NUM_STOPS])] = stops[:NUM_STOPS]
        if num_blocks > self.tables.shape[2]:
            self._widen(num_blocks)
        self.tokens[seat, :num_tokens] = np.frombuffer(tokens.data, np.int32)
        self.tables[0, seat, :num_blocks] = block_ids
        self.num_blocks[seat] = num_blocks
        self._updates.append((0, seat, 0, num_blocks))
        self.sequences[seat], self.sequence_ids[seat] = sequence, sequence.sequence_id
        self._arrivals[seat] = SeatArrival(
            seat, sequence.sequence_id, tokens, num_prompt, params, sequence.seed, sequence.stop_token_ids
        )
        return seat

    def leave(self, seat: Seat) -> None:
        """Empty a seat."""
        self.sequences[seat] = self.sequence_ids[seat] = None
        self.num_committed[seat] = self.lengths[:, seat] = 0
        self.ask_at[seat] = _MOST
        self.generation[seat] += 1
        self.scored.discard(seat)
        self.with_many_stops.discard(seat)
        self.structured.discard(seat)
        self.with_hidden.discard(seat)
        self._free.append(seat)
        if self._arrivals.pop(seat, None) is None:
            self._departures.append(seat)

    @property
    def num_schedulable(self) -> Ints:
        """Tokens (seats,) up to which each sequence can be computed: those known and those in flight."""
        known: Ints = np.minimum(self.num_tokens + self.num_in_flight, self.max_computed)
        return np.where(self.is_held, self.num_computed, known) if np.count_nonzero(self.is_held) else known

    def append_blocks(self, seat: Seat, block_ids: Seq[BlockId], group: int = 0) -> None:
        """Append blocks to a sequence's table."""
        begin = self.lengths.item(group, seat)
        end = begin + len(block_ids)
        if end > self.tables.shape[2]:
            self._widen(end)
        if end == begin + 1:  # as for decodes
            self.tables[group, seat, begin] = block_ids[0]
        else:
            self.tables[group, seat, begin:end] = block_ids
        self.lengths[group, seat] = end
        self._updates.append((group, seat, begin, end))

    def append_each(self, seats: Places, block_ids: Seq[BlockId], group: int = 0) -> None:
        """Append one block to the table of each of several sequences."""
        places = self.lengths[group].take(seats)
        if (num_blocks := int(places.max()) + 1) > self.tables.shape[2]:
            self._widen(num_blocks)
        self.tables[group][seats, places] = block_ids
        self.lengths[group][seats] = places + 1
        self._entries.append((np.full(len(seats), group, np.int32), seats.astype(np.int32), places))

    def set_blocks(self, seat: Seat, begin: int, block_ids: Seq[BlockId], group: int = 0) -> None:
        """Replace entries of a sequence's table."""
        if block_ids:
            self.tables[group, seat, begin : begin + len(block_ids)] = block_ids
            self._updates.append((group, seat, begin, begin + len(block_ids)))

    def _widen(self, num_blocks: int) -> None:
        self.tables, self.tokens = widened_tables(self.tables, self.tokens, self.lengths.max(0), num_blocks)

    def cut_blocks(self, seat: Seat, num_blocks: int, group: int = 0) -> list[BlockId]:
        """Remove the blocks after the first `num_blocks` from a sequence's table and return them."""
        cut: list[BlockId] = self.tables[group, seat, num_blocks : self.lengths[group, seat]].tolist()
        self.lengths[group, seat] = num_blocks
        return cut

    def replace_blocks(self, moved: Mapping[BlockId, BlockId], group: int = 0) -> None:
        """Replace each source block by its target in all tables of a KV group."""
        sources = np.array(sorted(moved), np.int32)
        targets = np.array([moved[source] for source in sources.tolist()], np.int32)
        lengths = self.lengths[group]
        for seat in np.flatnonzero(lengths).tolist():
            table = self.tables[group, seat, : lengths[seat]]
            place = np.minimum(np.searchsorted(sources, table), len(sources) - 1)
            is_moved = sources[place] == table
            if is_moved.any():
                table[is_moved] = targets[place[is_moved]]
                indices = np.flatnonzero(is_moved)
                self._updates.append((group, seat, int(indices[0]), int(indices[-1]) + 1))

    def block_ids(self, seat: Seat, group: int = 0) -> list[BlockId]:
        """Return the blocks of a sequence."""
        held: list[BlockId] = self.tables[group, seat, : self.lengths[group, seat]].tolist()
        return held

    def token_ids(self, seat: Seat) -> TokenIds:
        """Return prompt and output, packed together."""
        return TokenIds(self.tokens[seat, : self.num_tokens[seat]].tobytes())

    def take_arrivals(self) -> list[SeatArrival]:
        """Return the sequences that took a seat since the last step and still have it."""
        arrivals, self._arrivals = list(self._arrivals.values()), {}
        return arrivals

    def take_departures(self) -> list[Seat]:
        """Return the seats vacated since the last step."""
        departures, self._departures = self._departures, []
        return departures

    def take_block_updates(self) -> BlockUpdates | None:
        """Return what changed in block tables since the last step."""
        entries, self._entries = self._entries, []
        if self._updates:
            spans, self._updates = np.array(self._updates, np.int32), []
            entries.append(_entries_of(spans))
        if not entries:
            return None
        groups, seats, indices = (np.concatenate(parts) for parts in zip(*entries, strict=True))
        return BlockUpdates(groups, seats, indices, self.tables[groups, seats, indices])


def _entries_of(spans: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the groups, seats and indices of all entries in spans: (group, seat, first index, end) each."""
    lengths = spans[:, 3] - spans[:, 2]
    ends = np.cumsum(lengths)
    indices = np.arange(ends[-1], dtype=np.int32) + np.repeat(spans[:, 3] - ends, lengths).astype(np.int32)
    return np.repeat(spans[:, 0], lengths), np.repeat(spans[:, 1], lengths), indices
