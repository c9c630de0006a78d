"""Another engine's requests as columns: each keeps its row as long as that engine knows it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from sagellm.core import DEFAULT_TENANT, RequestRows, ScheduleRequest, Tenant
from sagellm.core.protocols.request_rows import CHANGING_COLUMNS, SCHEDULE_COLUMNS
from sagellm.core.tenant import hash_of
from sagellm.core.tokens import TokenIds, pack
from sagellm.core.unchecked import unchecked

Ints = npt.NDArray[np.int32]


class ForeignRequest(Protocol):
    """What both our passes and other engines know of a request. Times are seconds on the engine's clock."""

    request_id: str
    priority: int
    arrival_time: float
    num_prompt_tokens: int
    max_tokens: int
    num_computed_tokens: int

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""


R = TypeVar("R", bound=ForeignRequest)

_FIXED = {name: dtype for name, dtype in SCHEDULE_COLUMNS.items() if name not in CHANGING_COLUMNS}
_NUM_COMPUTED = attrgetter("num_computed_tokens")


class RequestTable(Generic[R]):
    """The columns of all requests of an engine, waiting or running. Not thread-safe.

    `tenant_of` and `deadline_of` read what the engine itself has no word for. `num_schedulable` returns up to
    which token a running request can be computed: those known, and those in flight.
    """

    def __init__(
        self,
        block_size: int,
        *,
        num_schedulable: Callable[[R], int],
        tenant_of: Callable[[R], Tenant] = lambda _: DEFAULT_TENANT,
        deadline_of: Callable[[R], float] = lambda _: float("inf"),
        smaller_is_more_urgent: bool = False,
    ) -> None:
        self._block_size = block_size
        self._num_schedulable = num_schedulable
        self._tenant_of, self._deadline_of = tenant_of, deadline_of
        self._urgency = -1 if smaller_is_more_urgent else 1
        self._row_of: dict[R, int] = {}
        self._requests: list[R | None] = []
        self._objects: list[ScheduleRequest | None] = []  # of those that wait, once somebody has read them
        self._free: list[int] = []
        self._fixed: dict[str, npt.NDArray[Any]] = {name: np.empty(0, kind) for name, kind in _FIXED.items()}
        self.num_tokens: Ints = np.empty(0, np.int32)  # of those that wait
        self.last_step: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._running: list[R] = []  # as `running_rows` saw them last
        self._running_index: Ints = np.empty(0, np.int32)
        self._running_kept: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self._row_of)

    @property
    def num_rows(self) -> int:
        """Rows in use and free: each row is less than that."""
        return len(self._requests)

    def find(self, request: R) -> int | None:
        """Return the row of a request; None if it has none."""
        return self._row_of.get(request)

    def row_of(self, request: R) -> int:
        """Return the row of a request, giving it one if it is new."""
        row = self._row_of.get(request)
        return self.enter(request) if row is None else row

    def request_of(self, row: int) -> R:
        """Return the request of a row that is in use."""
        request = self._requests[row]
        assert request is not None, "the row is in use"
        return request

    def drop(self, request: R) -> None:
        """Give a row back, if the request has one: the engine has forgotten it."""
        row = self._row_of.pop(request, None)
        if row is not None:
            self._requests[row] = None
            self._free.append(row)

    def enter(self, request: R) -> int:
        """Write a request to its row, giving it one if it is new; return the row."""
        row = self._row_of.get(request)
        if row is None:
            if not self._free:
                self._grow()
            row = self._free.pop()
            self._row_of[request], self._requests[row] = row, request
            self.last_step[row] = -1
        fixed = self._fixed
        tenant = self._tenant_of(request)
        fixed["priority"][row] = max(-(1 << 31), min(self._urgency * request.priority, (1 << 31) - 1))
        fixed["arrived_time"][row] = request.arrival_time
        fixed["num_prompt_tokens"][row] = request.num_prompt_tokens
        fixed["confidence"][row] = 0.0
        fixed["max_tokens"][row] = request.max_tokens
        fixed["deadline"][row] = self._deadline_of(request)
        fixed["tenant"][row] = tenant.code
        fixed["weight"][row] = tenant.weight
        fixed["is_trusted"][row] = tenant.is_trusted
        fixed["key"][row] = hash_of(request.request_id)
        self.note_waiting(row)
        return row

    def note_waiting(self, row: int) -> None:
        """Note how many tokens a request has that waits from now on."""
        self.num_tokens[row] = self.request_of(row).num_tokens
        self._objects[row] = None

    def _grow(self) -> None:
        before = len(self._requests)
        after = max(64, 2 * before)
        for name, column in self._fixed.items():
            self._fixed[name] = _longer(column, after)
        self.num_tokens, self.last_step = _longer(self.num_tokens, after), _longer(self.last_step, after)
        self._requests += [None] * (after - before)
        self._objects += [None] * (after - before)
        self._free += range(after - 1, before - 1, -1)

    def waiting_rows(self, index: npt.NDArray[Any]) -> RequestRows:
        """Return waiting requests by their rows."""
        columns = _Columns(self._fixed, num_tokens=self.num_tokens, last_scheduled_step=self.last_step)
        return RequestRows(columns, index, self._waiting)

    def running_rows(self, running: Sequence[R], *, has_prompts: bool) -> RunningRows:
        """Return running requests; what changes is read from them when somebody asks for it.

        `has_prompts` says whether one of them can compute more than a token.
        """
        if running != self._running:  # compares identities: 1 µs for 256
            self._running = list(running)  # a new list: earlier rows keep theirs
            try:
                index = [*map(self._row_of.__getitem__, self._running)]  # most have waited here
            except KeyError:
                index = [*map(self.row_of, self._running)]
            self._running_index = np.array(index, np.int32)
            self._running_kept = {}
        requests = self._running
        columns = _Columns(
            self._fixed,
            num_tokens=_Read(self._num_schedulable, requests),
            num_computed_tokens=_Read(_NUM_COMPUTED, requests),
            last_scheduled_step=self.last_step,
        )
        rows = RunningRows(columns, self._running_index, self._as_object, self._running_kept)
        rows.block_size, rows.has_prompts = self._block_size, has_prompts
        return rows

    def running(self) -> Sequence[R]:
        """Return the requests of the last `running_rows`, by position."""
        return self._running

    def scheduled(self, step: int, num_scheduled: Mapping[str, int], admitted: Iterable[R]) -> None:
        """Note who computes something in a step: tokens by request."""
        new = [self.row_of(request) for request in admitted]
        if len(num_scheduled) - len(new) == len(self._running):
            self.last_step[self._running_index] = step
        else:
            new += [self._row_of[each] for each in self._running if each.request_id in num_scheduled]
        self.last_step[new] = step

    def _waiting(self, row: int) -> ScheduleRequest:
        found = self._objects[row]
        if found is None:
            found = self._objects[row] = self._as_object(row)
        return found

    def _as_object(self, row: int) -> ScheduleRequest:
        request = self.request_of(row)
        deadline = self._deadline_of(request)
        return unchecked(
            _Row,
            request=request,
            request_id=request.request_id,
            max_tokens=request.max_tokens,
            priority=self._urgency * request.priority,
            arrived_time=request.arrival_time,
            num_tokens=request.num_tokens,
            num_computed_tokens=request.num_computed_tokens,
            num_blocks=-(-request.num_computed_tokens // self._block_size),
            last_scheduled_step=int(self.last_step[row]),
            deadline=None if deadline == float("inf") else deadline,
            tenant=self._tenant_of(request),
        )


class _Row(ScheduleRequest):
    """A request of another engine as an object, whose prompt is packed if somebody reads it."""

    request: Any

    @cached_property
    def token_ids(self) -> TokenIds:
        """The prompt; zeros where the engine has embeddings in its place."""
        prompt = getattr(self.request, "prompt_token_ids", None)
        return pack(prompt or [0] * self.request.num_prompt_tokens)


class _Read(Generic[R]):
    """A column that is read from running requests when it is gathered."""

    def __init__(self, read: Callable[[R], int], requests: Sequence[R]) -> None:
        self._read, self._requests = read, requests

    def take(self, index: Ints) -> Ints:
        """Return the values of all rows; `index` has their number."""
        return np.fromiter(map(self._read, self._requests), np.int32, len(index))


class RunningRows(RequestRows):
    """Rows that know without a look at them whether a prompt is among them; blocks follow from tokens."""

    __slots__ = ("block_size", "has_prompts")

    block_size: int
    has_prompts: bool

    @property
    def num_prefills(self) -> int:
        """Rows that can compute several tokens, of a prompt."""
        return super().num_prefills if self.has_prompts else 0

    @property
    def num_blocks(self) -> Ints:  # type: ignore[override]
        """Blocks that the computed tokens of each fill or begin."""
        num: Ints = -(-self.num_computed_tokens // self.block_size)
        return num


class _Columns(dict[str, Any]):
    """The columns of a table; the rest are the same for all: nothing computed, nothing predicted."""

    def __missing__(self, name: str) -> npt.NDArray[Any]:
        value = float("nan") if name == "predicted_remaining_tokens" else 0
        found = self[name] = np.full(len(self["key"]), value, SCHEDULE_COLUMNS[name])
        return found


def _longer(column: npt.NDArray[Any], num_rows: int) -> npt.NDArray[Any]:
    return np.concatenate((column, np.zeros(num_rows - len(column), column.dtype)))
