"""Requests as a scheduler and its passes see them in one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeVar, overload

from sagellm.core.namespace import DEFAULT, Namespace
from sagellm.core.tenant import DEFAULT_TENANT, Tenant, hash_of
from sagellm.core.tokens import TokenIds, TokenIdsLike, pack

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ints = npt.NDArray[np.int32]
    _T = TypeVar("_T", bound=np.generic)
else:
    _T = TypeVar("_T")

# numpy is imported by the functions that make arrays, so that core alone needs none.


class PrefixHit(NamedTuple):
    """What the prefix cache holds of a waiting request.

    `num_blocks_needed` is what its admission takes from the available memory: blocks to allocate
    plus cached blocks that its lock makes unavailable.
    """

    num_tokens: int
    num_blocks_needed: int


@dataclass(frozen=True)
class ScheduleRequest:
    """A request as schedulers and passes see it in one step. Times are seconds on the engine's clock.

    For a waiting request, `kv_blocks_needed` is its hit's `num_blocks_needed`; if None, it is
    derived from the tokens and the hit. Both are read only without a probe.
    """

    request_id: str
    token_ids: TokenIdsLike  # the prompt, kept packed
    max_tokens: int
    priority: int = 0  # larger is more urgent
    arrived_time: float = 0.0
    prefix_cache_hit: int = 0  # tokens
    kv_blocks_needed: int | None = None
    num_tokens: int = 0  # prompt + generated so far, with those in flight; 0 means the prompt alone
    num_computed_tokens: int = 0  # whose KV exists, or will be after the steps in flight
    num_blocks: int = 0  # held
    last_scheduled_step: int = -1
    predicted_remaining_tokens: float | None = None
    confidence: float | None = None  # of that prediction, 0 to 1
    deadline: float | None = None  # for the whole answer
    namespace: Namespace = DEFAULT
    tenant: Tenant = DEFAULT_TENANT

    def __post_init__(self) -> None:
        if not isinstance(self.token_ids, TokenIds):
            object.__setattr__(self, "token_ids", pack(self.token_ids))
        if self.num_tokens == 0:
            object.__setattr__(self, "num_tokens", len(self.token_ids))

    def stated_hit(self, block_size: int) -> PrefixHit:
        """Return the hit stated in the row."""
        num_blocks = self.kv_blocks_needed
        if num_blocks is None:
            num_blocks = -(-self.num_tokens // block_size) - self.prefix_cache_hit // block_size
        return PrefixHit(self.prefix_cache_hit, num_blocks)


Probe = Callable[[ScheduleRequest], PrefixHit]
"""Queries the prefix cache for a waiting request; called only for requests whose hit is needed."""


class _Column(Generic[_T]):
    """A column of `RequestRows`, gathered when it is first read."""

    def __init__(self, doc: str) -> None:
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, rows: None, owner: type) -> Self: ...

    @overload
    def __get__(self, rows: RequestRows, owner: type) -> npt.NDArray[_T]: ...

    def __get__(self, rows: RequestRows | None, owner: type) -> Any:
        if rows is None:
            return self
        gathered = rows._gathered if self._name in CHANGING_COLUMNS else rows._kept
        column = gathered.get(self._name)
        if column is None:
            column = gathered[self._name] = rows._columns[self._name].take(rows._index)
            column.setflags(write=False)
        return column


class RequestRows(Sequence[ScheduleRequest]):
    """The same requests as columns, each (rows,) and read-only, so that passes sort arrays, not objects.

    Column `x` is `columns["x"][index]`, gathered when it is first read, and item `i` is
    `make(index[i])`. A row never read costs nothing; `len` is O(1). `kept` may be shared by successive rows
    of the same requests: it takes what was gathered of everything but CHANGING_COLUMNS.
    """

    __slots__ = ("_columns", "_gathered", "_index", "_kept", "_make")

    priority = _Column["np.int32"]("Larger is more urgent.")
    arrived_time = _Column["np.float64"]("Seconds on the engine's clock.")
    num_prompt_tokens = _Column["np.int32"]("Tokens of each prompt.")
    num_tokens = _Column["np.int32"]("Prompt and output, including tokens in flight.")
    num_computed_tokens = _Column["np.int32"]("Tokens whose KV exists, or will be after the steps in flight.")
    num_blocks = _Column["np.int32"]("Blocks held.")
    last_scheduled_step = _Column["np.int64"]("The last step that computed part of it; -1: none yet.")
    predicted_remaining_tokens = _Column["np.float32"]("Expected; NaN if unknown.")
    confidence = _Column["np.float32"]("Of the predictions, 0 to 1; 0 if unknown.")
    max_tokens = _Column["np.int32"]("Output tokens at which each ends at the latest.")
    deadline = _Column["np.float64"]("Seconds on the engine's clock; infinite if there is none.")
    tenant = _Column["np.int64"]("`Tenant.code` of each.")
    weight = _Column["np.float32"]("The weight of each one's tenant.")
    is_trusted = _Column["np.bool_"]("Whether each one's tenant is trusted.")
    key = _Column["np.int64"](
        "A number that stands for the request as long as it lives: `hash_of(request_id)`."
    )

    def __init__(
        self,
        columns: Mapping[str, npt.NDArray[Any]],
        index: npt.NDArray[Any],
        make: Callable[[int], ScheduleRequest],
        kept: dict[str, Any] | None = None,
    ) -> None:
        self._columns = columns
        self._index = index
        self._make = make
        self._gathered: dict[str, Any] = {}
        self._kept = self._gathered if kept is None else kept

    @classmethod
    def of(cls, requests: Sequence[ScheduleRequest]) -> RequestRows:
        """Return the rows of request objects; rows pass through. The sequence may change afterwards."""
        if isinstance(requests, RequestRows):
            return requests
        import numpy as np

        kept = tuple(requests)
        return cls(_ObjectColumns(kept), np.arange(len(kept)), kept.__getitem__)

    def __len__(self) -> int:
        return len(self._index)

    @overload
    def __getitem__(self, row: int) -> ScheduleRequest: ...
    @overload
    def __getitem__(self, row: slice) -> RequestRows: ...
    def __getitem__(self, row: int | slice) -> ScheduleRequest | RequestRows:
        if isinstance(row, slice):
            return RequestRows(self._columns, self._index[row], self._make)
        return self._make(int(self._index[row]))

    @property
    def positions(self) -> Ints:
        """The positions of all rows: 0, 1, …"""
        positions: Ints | None = self._kept.get("positions")
        if positions is None:
            import numpy as np

            positions = self._kept["positions"] = np.arange(len(self), dtype=np.int32)
            positions.setflags(write=False)
        return positions

    @property
    def num_missing(self) -> Ints:
        """Tokens that can be computed: 1 for a decode, 0 for a request that waits for a step in flight."""
        missing: Ints | None = self._gathered.get("num_missing")
        if missing is None:
            import numpy as np

            missing = np.maximum(self.num_tokens - self.num_computed_tokens, 0)
            missing.setflags(write=False)
            self._gathered["num_missing"] = missing
        return missing

    @property
    def num_prefills(self) -> int:
        """Rows that can compute several tokens, of a prompt."""
        num_prefills: int | None = self._gathered.get("num_prefills")
        if num_prefills is None:
            import numpy as np

            num_prefills = self._gathered["num_prefills"] = int(np.count_nonzero(self.num_missing > 1))
        return num_prefills

    @property
    def has_one_tenant(self) -> bool:
        """Whether all rows are of the same tenant; true if there are none."""
        is_one = self._kept.get("has_one_tenant")
        if is_one is None:
            import numpy as np

            tenant = self.tenant
            is_one = not len(tenant) or not np.count_nonzero(tenant != tenant[0])
            self._kept["has_one_tenant"] = is_one
        return bool(is_one)

    def by_rank(self) -> npt.NDArray[np.intp]:
        """Return the positions in order of rank: priority, then arrival, then position."""
        import numpy as np

        urgency = self.priority.astype(np.int64)  # the lowest int32 has no negative
        return np.lexsort((self.arrived_time, -urgency))


SCHEDULE_COLUMNS: Mapping[str, str] = {
    "priority": "i4",
    "arrived_time": "f8",
    "num_prompt_tokens": "i4",
    "num_tokens": "i4",
    "num_computed_tokens": "i4",
    "num_blocks": "i4",
    "last_scheduled_step": "i8",
    "predicted_remaining_tokens": "f4",
    "confidence": "f4",
    "max_tokens": "i4",
    "deadline": "f8",
    "tenant": "i8",
    "weight": "f4",
    "is_trusted": "?",
    "key": "i8",
}
"""The columns of rows, with their numpy types."""

CHANGING_COLUMNS = frozenset(
    {
        "num_tokens",
        "num_computed_tokens",
        "num_blocks",
        "last_scheduled_step",
        "predicted_remaining_tokens",
    }
)
"""Those that change while a request waits or runs."""

_DERIVED: Mapping[str, Callable[[ScheduleRequest], float]] = {
    "num_prompt_tokens": lambda row: len(row.token_ids),
    "predicted_remaining_tokens": (
        lambda row: float("nan") if (left := row.predicted_remaining_tokens) is None else left
    ),
    "confidence": lambda row: row.confidence or 0.0,
    "deadline": lambda row: float("inf") if row.deadline is None else row.deadline,
    "tenant": lambda row: row.tenant.code,
    "weight": lambda row: row.tenant.weight,
    "is_trusted": lambda row: row.tenant.is_trusted,
    "key": lambda row: hash_of(row.request_id),
}


class _ObjectColumns(dict[str, Any]):
    """The columns of request objects, each made on demand."""

    def __init__(self, requests: tuple[ScheduleRequest, ...]) -> None:
        self._requests = requests

    def __missing__(self, name: str) -> Any:
        import numpy as np

        value = _DERIVED.get(name) or attrgetter(name)
        return np.fromiter(map(value, self._requests), SCHEDULE_COLUMNS[name], len(self._requests))
