"""The waiting sequences in the order of admission, with columns that passes can sort."""

from __future__ import annotations

from bisect import bisect_right
from itertools import compress
from operator import is_

import numpy as np
import numpy.typing as npt

from sagellm.core import RequestRows, ScheduleRequest, SequenceId
from sagellm.core.unchecked import unchecked
from sagellm.engines.engine_core.seats import RemainingColumns, ScheduleColumns
from sagellm.engines.engine_core.sequence import Sequence


class WaitingRows:
    """Waiting sequences, the most urgent first and among equals the earliest; each has a row in the columns.

    Adding or removing one costs O(waiting) in two short memory moves; looking at the first ones is free.
    """

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self._order: npt.NDArray[np.int32] = np.empty(0, np.int32)  # their rows
        self._row_of: dict[SequenceId, int] = {}
        self._free: list[int] = []
        self._rows: RequestRows | None = None  # as long as none is added or removed, with what was gathered
        self._by_row: list[Sequence | None] = []
        self._columns = ScheduleColumns()
        self._num_tokens: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self._zeros = self._num_tokens
        self._never_scheduled: npt.NDArray[np.int64] = np.empty(0, np.int64)  # -1

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, place: int) -> Sequence:
        return self._sequences[place]

    def add(self, sequence: Sequence) -> int:
        """Insert a sequence in order and return its place, from 0."""
        self._rows = None
        if not self._free:
            self._grow()
        row = self._free.pop()
        self._columns.put(row, sequence)
        self._num_tokens[row] = sequence.num_tokens
        self._row_of[sequence.sequence_id], self._by_row[row] = row, sequence
        place = place_of(sequence, self._sequences)
        self._sequences.insert(place, sequence)
        self._order = np.concatenate((self._order[:place], (row,), self._order[place:]), dtype=np.int32)
        return place

    def remove(self, *sequences: Sequence) -> None:
        """Remove sequences."""
        for sequence in sequences:
            row = self._row_of.pop(sequence.sequence_id)
            self._by_row[row] = None
            self._free.append(row)
        if all(map(is_, self._sequences, sequences)):  # the first ones, as most often
            del self._sequences[: len(sequences)]
            self._order = self._order[len(sequences) :]
        else:
            is_kept = np.ones(len(self._sequences), np.bool_)
            is_kept[[self._sequences.index(sequence) for sequence in sequences]] = False
            self._sequences = list(compress(self._sequences, is_kept.tolist()))
            self._order = self._order[is_kept]
        self._rows = None

    def refresh(self) -> None:
        """Read again what is predicted of each."""
        for sequence_id, row in self._row_of.items():
            sequence = self._by_row[row]
            assert sequence is not None, sequence_id
            self._columns.put(row, sequence)
        self._rows = None

    def rows(self) -> RequestRows:
        """Return them as a scheduler sees them, valid until one is added or removed."""
        if self._rows is None:
            self._rows = self._new_rows()
        return self._rows

    def _new_rows(self) -> RequestRows:
        columns = RemainingColumns(
            self._columns.arrays,
            num_tokens=self._num_tokens,
            num_computed_tokens=self._zeros,
            num_blocks=self._zeros,
            last_scheduled_step=self._never_scheduled,
        )
        return RequestRows(columns, self._order, self._request)

    def _request(self, row: int) -> ScheduleRequest:
        sequence = self._by_row[row]
        assert sequence is not None
        return schedule_request(sequence, num_tokens=sequence.num_tokens)

    def _grow(self) -> None:
        before = len(self._by_row)
        after = max(16, 2 * before)
        self._columns.grow(after)
        self._num_tokens = np.concatenate((self._num_tokens, np.zeros(after - before, np.int32)))
        self._zeros, self._never_scheduled = np.zeros(after, np.int32), np.full(after, -1)
        self._by_row += [None] * (after - before)
        self._free += range(after - 1, before - 1, -1)


def schedule_request(sequence: Sequence, *, num_tokens: int, **counts: int) -> ScheduleRequest:
    """Return the row of a sequence as an object."""
    request, remaining = sequence.request, sequence.predicted_tokens
    if remaining is not None:
        remaining = max(remaining - (num_tokens - len(request.token_ids)), 1.0)
    return unchecked(
        ScheduleRequest,
        request_id=sequence.sequence_id,
        token_ids=request.token_ids,
        max_tokens=request.max_tokens,
        priority=request.priority,
        arrived_time=request.arrival_ns / 1e9,
        num_tokens=num_tokens,
        predicted_remaining_tokens=remaining,
        confidence=sequence.confidence,
        deadline=None if request.deadline_ns is None else request.deadline_ns / 1e9,
        namespace=request.namespace,
        tenant=request.tenant,
        **counts,
    )


def place_of(sequence: Sequence, sequences: list[Sequence]) -> int:
    """Return where a sequence belongs among others: the most urgent first, and among equals the earliest.

    Most often that is behind the last one.
    """
    order = _admission_order(sequence)
    if not sequences or _admission_order(sequences[-1]) <= order:
        return len(sequences)
    return bisect_right(sequences, order, key=_admission_order)


def _admission_order(sequence: Sequence) -> tuple[int, int]:
    return (-sequence.request.priority, sequence.request.arrival_ns)
