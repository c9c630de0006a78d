"""The waiting sequences in the order of admission, with columns that passes can sort."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
import numpy.typing as npt

from sagellm.core import RequestRows, ScheduleRequest, SequenceId
from sagellm.engines.engine_core.schedule_columns import RemainingColumns, ScheduleColumns, schedule_request
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
        self._by_row: list[Sequence | None] = []
        self._columns = ScheduleColumns()
        self._num_tokens: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self._zeros = self._num_tokens
        self._none: npt.NDArray[np.int64] = np.empty(0, np.int64)  # -1: not scheduled yet

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, place: int) -> Sequence:
        return self._sequences[place]

    def add(self, sequence: Sequence) -> None:
        """Insert a sequence in order."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        self._columns.put(row, sequence)
        self._num_tokens[row] = sequence.num_tokens
        self._row_of[sequence.sequence_id], self._by_row[row] = row, sequence
        place = bisect_right(self._sequences, admission_order(sequence), key=admission_order)
        self._sequences.insert(place, sequence)
        self._order = np.insert(self._order, place, row)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence."""
        place = self._sequences.index(sequence)
        del self._sequences[place]
        self._order = np.delete(self._order, place)
        row = self._row_of.pop(sequence.sequence_id)
        self._by_row[row] = None
        self._free.append(row)

    def rows(self) -> RequestRows:
        """Return them as a scheduler sees them, valid until one is added or removed."""
        columns = RemainingColumns(
            self._columns.arrays,
            num_tokens=self._num_tokens,
            num_computed_tokens=self._zeros,
            num_blocks=self._zeros,
            last_scheduled_step=self._none,
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
        self._zeros, self._none = np.zeros(after, np.int32), np.full(after, -1)
        self._by_row += [None] * (after - before)
        self._free += range(after - 1, before - 1, -1)


def admission_order(sequence: Sequence) -> tuple[int, int]:
    """Return the sort key of waiting and running sequences."""
    return (-sequence.request.priority, sequence.request.arrival_ns)
