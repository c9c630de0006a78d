"""Another engine's queue of waiting requests, which passes reorder for one step at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Generic

import numpy as np
import numpy.typing as npt

from sagellm.adapters.request_table import R, RequestTable
from sagellm.core import RequestRows

Index = npt.NDArray[np.int32]

_FIRST_SIZE = 64


class WaitingQueue(Generic[R]):
    """A queue to whose end requests are added and to whose front they come back, as in vLLM's own queues.

    Between `open` and `close` it yields requests in the order that passes chose, and is empty once only those
    are left that they deferred; `len` counts all of them at any time. Whoever is popped and comes back is at
    the front of the queue, and is not yielded again before the queue is closed.

    Adding and popping are O(1), amortised, and removing others O(waiting).
    """

    def __init__(self, table: RequestTable[R]) -> None:
        self._table = table
        self._buffer: Index = np.empty(_FIRST_SIZE, np.int32)
        self._start = self._end = _FIRST_SIZE // 2  # of the rows in the queue
        self._order: npt.NDArray[Any] | None = None  # positions that this step may yield, in order
        self._planned = self._buffer[:0]  # their rows
        self._next = 0
        self._popped: list[int] = []  # rows that a planned step has taken, still in the queue
        self._taken: dict[int, int] = {}  # rows that were popped since `rows`, and their positions there
        self._rows: RequestRows | None = None  # as long as the queue stays the same

    @property
    def _queue(self) -> Index:
        return self._buffer[self._start : self._end]

    def rows(self) -> RequestRows:
        """Return the requests in the order of the queue: the same object, as long as these are the same.

        Valid until it is called again, whatever is popped.
        """
        self._settle()
        if self._taken:
            self._taken = {}
        if self._rows is None:
            self._rows = self._table.waiting_rows(self._queue)
        return self._rows

    @property
    def is_as_seen(self) -> bool:
        """Whether those wait whom `rows` returned last."""
        return self._rows is not None and not self._popped

    def open(self, order: npt.NDArray[Any]) -> None:
        """Yield these positions of the queue, in this order and no others, until it is closed."""
        self._settle()
        self._order, self._planned, self._next = order, self._queue[order], 0

    def close(self) -> None:
        """Be the whole queue again."""
        self._settle()
        self._order = None

    def requests_at(self, positions: Iterable[int]) -> list[R]:
        """Return the requests at positions of the queue, as long as nothing is added or popped."""
        return [self._table.request_of(self._buffer.item(self._start + position)) for position in positions]

    def taken(self) -> dict[int, R]:
        """Return who was popped since `rows` and has not come back, by position there."""
        return {position: self._table.request_of(row) for row, position in self._taken.items()}

    def add_request(self, request: R) -> None:
        """Add a request at the end."""
        self._changed()
        if self._end == len(self._buffer):
            self._grow()
        self._buffer[self._end] = self._table.enter(request)
        self._end += 1

    def pop_request(self) -> R:
        """Take the first request. Raises IndexError if there is none."""
        row = self._first()
        if self._order is None:
            self._taken[row] = len(self._taken)
            self._start += 1
            self._rows = None
        else:
            self._taken[row] = int(self._order[self._next])
            self._next += 1
            self._popped.append(row)
        return self._table.request_of(row)

    def peek_request(self) -> R:
        """Return the first request. Raises IndexError if there is none."""
        return self._table.request_of(self._first())

    def prepend_request(self, request: R) -> None:
        """Put a request at the front."""
        self.prepend_requests((request,))

    def prepend_requests(self, requests: Iterable[R]) -> None:
        """Put requests at the front one after another, so that the last of them comes first."""
        self._changed()
        for request in requests:
            if not self._start:
                self._grow()
            self._start -= 1
            self._buffer[self._start] = row = self._table.row_of(request)
            self._table.note_waiting(row)  # one that was preempted has output
            self._taken.pop(row, None)

    def remove_request(self, request: R) -> None:
        """Remove a request. Raises ValueError if it does not wait here."""
        if not self._remove([request]):
            raise ValueError(f"the request {request.request_id} does not wait here")

    def remove_requests(self, requests: Iterable[R]) -> None:
        """Remove those of these requests that wait here."""
        self._remove(requests)

    def __bool__(self) -> bool:
        if self._order is None:
            return self._end > self._start
        return self._next < len(self._planned)

    def __len__(self) -> int:
        return self._end - self._start - len(self._popped)

    def __iter__(self) -> Iterator[R]:
        self._settle()
        return iter([self._table.request_of(row) for row in self._queue.tolist()])

    def _first(self) -> int:
        if self._order is None:
            if self._start == self._end:
                raise IndexError("nothing waits")
            return self._buffer.item(self._start)
        if self._next >= len(self._planned):
            raise IndexError("nothing that may be admitted waits")
        return self._planned.item(self._next)

    def _changed(self) -> None:
        self._settle()
        self._rows = None

    def _settle(self) -> None:
        """Take out of the queue what was popped."""
        popped = self._popped
        if not popped:
            return
        queue, num_popped = self._queue, len(popped)
        if queue[:num_popped].tolist() == popped:
            self._start += num_popped
        else:
            self._keep(self._without(popped))
        self._popped, self._rows = [], None

    def _remove(self, requests: Iterable[R]) -> int:
        self._settle()
        rows = [row for request in requests if (row := self._table.find(request)) is not None]
        stays = self._without(rows)
        num_removed = len(stays) - int(np.count_nonzero(stays))
        if num_removed:
            self._keep(stays)
            self._rows = None
        return num_removed

    def _without(self, rows: list[int]) -> npt.NDArray[np.bool_]:
        """Return which of those in the queue are not at these rows of the table."""
        stays = np.ones(self._table.num_rows, np.bool_)  # by row: `np.isin` sorts both
        stays[rows] = False
        queued: npt.NDArray[np.bool_] = stays[self._queue]
        return queued

    def _keep(self, stays: npt.NDArray[np.bool_]) -> None:
        """Move what stays to new memory: rows of this step still look at the old one."""
        self._replace(self._queue[stays])

    def _grow(self) -> None:
        self._replace(self._queue)

    def _replace(self, queue: Index) -> None:
        """Put a queue in the middle of new memory."""
        buffer = np.empty(max(_FIRST_SIZE, 3 * len(queue)), np.int32)
        self._start = (len(buffer) - len(queue)) // 2
        self._end = self._start + len(queue)
        buffer[self._start : self._end] = queue
        self._buffer = buffer
