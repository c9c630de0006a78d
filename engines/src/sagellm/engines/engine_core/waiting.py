"""The waiting sequences in the order of admission, with columns that passes can sort."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
import numpy.typing as npt

from sagellm.core import RequestRows, ScheduleRequest, SequenceId
from sagellm.engines.engine_core.sequence import Sequence

_COLUMNS = {
    "priority": np.int32,
    "arrived_time": np.float64,
    "num_prompt_tokens": np.int32,
    "num_tokens": np.int32,
    "num_computed_tokens": np.int32,
    "num_blocks": np.int32,
    "last_scheduled_step": np.int64,
    "predicted_remaining_tokens": np.float32,
}


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
        self._columns = {name: np.empty(0, dtype) for name, dtype in _COLUMNS.items()}

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, place: int) -> Sequence:
        return self._sequences[place]

    def add(self, sequence: Sequence) -> None:
        """Insert a sequence in order."""
        if not self._free:
            self._grow()
        row, request = self._free.pop(), sequence.request
        predicted = sequence.predicted_remaining_tokens
        values = {
            "priority": request.priority,
            "arrived_time": request.arrival_ns / 1e9,
            "num_prompt_tokens": len(request.token_ids),
            "num_tokens": sequence.num_tokens,
            "predicted_remaining_tokens": np.nan if predicted is None else predicted,
        }
        for name, value in values.items():
            self._columns[name][row] = value
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
        return RequestRows(self._columns, self._order, self._request)

    def _request(self, row: int) -> ScheduleRequest:
        sequence = self._by_row[row]
        assert sequence is not None
        request = sequence.request
        return ScheduleRequest(
            request_id=sequence.sequence_id,
            token_ids=request.token_ids,
            max_tokens=request.max_tokens,
            priority=request.priority,
            arrived_time=request.arrival_ns / 1e9,
            num_tokens=sequence.num_tokens,
            predicted_remaining_tokens=sequence.predicted_remaining_tokens,
            namespace=request.namespace,
        )

    def _grow(self) -> None:
        before = len(self._by_row)
        after = max(16, 2 * before)
        for name, dtype in _COLUMNS.items():
            column = np.full(after, -1 if name == "last_scheduled_step" else 0, dtype)
            column[:before] = self._columns[name]
            self._columns[name] = column
        self._by_row += [None] * (after - before)
        self._free += range(after - 1, before - 1, -1)


def admission_order(sequence: Sequence) -> tuple[int, int]:
    """Return the sort key of waiting and running sequences."""
    return (-sequence.request.priority, sequence.request.arrival_ns)
