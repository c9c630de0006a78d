"""What schedulers and passes read and write: immutable rows of requests, and decisions about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

from sagellm.core.namespace import DEFAULT, Namespace
from sagellm.core.tokens import TokenIdsLike, pack

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ints = npt.NDArray[np.int32]

# numpy is imported by the functions that make arrays, so that core alone needs none.

Part = Literal["pending", "running"]
Limit = Literal["available_memory", "max_num_batched_tokens", "max_num_seqs"]
LIMITS: tuple[Limit, ...] = ("available_memory", "max_num_batched_tokens", "max_num_seqs")


class PrefixHit(NamedTuple):
    """What the prefix cache holds of a waiting request.

    `num_blocks_needed` is what its admission takes from the available memory: blocks to allocate
    plus cached blocks that its lock makes unavailable.
    """

    num_tokens: int
    num_blocks_needed: int


@dataclass(frozen=True, slots=True)
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
    num_in_flight: int = 0  # of num_tokens: sampled by steps that are not collected yet
    num_blocks: int = 0  # held
    last_scheduled_step: int = -1
    predicted_remaining_tokens: float | None = None
    prediction_confidence: float | None = None  # 0 … 1
    deadline: float | None = None
    namespace: Namespace = DEFAULT

    def __post_init__(self) -> None:
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


class RequestRows(Sequence[ScheduleRequest]):
    """The same requests as columns, each (rows,) and read-only, so that passes sort arrays, not objects.

    Column `x` is `columns["x"][index]`, gathered when it is first read, and item `i` is
    `make(index[i])`. A row never read costs nothing; `len` is O(1).
    """

    __slots__ = ("_columns", "_gathered", "_index", "_make")

    def __init__(
        self,
        columns: Mapping[str, npt.NDArray[Any]],
        index: npt.NDArray[Any],
        make: Callable[[int], ScheduleRequest],
    ) -> None:
        self._columns = columns
        self._index = index
        self._make = make
        self._gathered: dict[str, Any] = {}

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
    def priority(self) -> Ints:
        """Larger is more urgent."""
        column: Ints = self._column("priority")
        return column

    @property
    def arrived_time(self) -> npt.NDArray[np.float64]:
        """Seconds on the engine's clock."""
        column: npt.NDArray[np.float64] = self._column("arrived_time")
        return column

    @property
    def num_prompt_tokens(self) -> Ints:
        """Tokens of each prompt."""
        column: Ints = self._column("num_prompt_tokens")
        return column

    @property
    def num_tokens(self) -> Ints:
        """Prompt and output, including tokens in flight."""
        column: Ints = self._column("num_tokens")
        return column

    @property
    def num_computed_tokens(self) -> Ints:
        """Tokens whose KV exists, or will be after the steps in flight."""
        column: Ints = self._column("num_computed_tokens")
        return column

    @property
    def num_blocks(self) -> Ints:
        """Blocks held."""
        column: Ints = self._column("num_blocks")
        return column

    @property
    def last_scheduled_step(self) -> npt.NDArray[np.int64]:
        """The last step that computed part of it; -1: none yet."""
        column: npt.NDArray[np.int64] = self._column("last_scheduled_step")
        return column

    @property
    def predicted_remaining_tokens(self) -> npt.NDArray[np.float32]:
        """NaN if unknown."""
        column: npt.NDArray[np.float32] = self._column("predicted_remaining_tokens")
        return column

    def by_rank(self) -> npt.NDArray[np.intp]:
        """Return the positions in order of rank: priority, then arrival, then position."""
        import numpy as np

        return np.lexsort((self.arrived_time, -self.priority))

    def _column(self, name: str) -> Any:
        column = self._gathered.get(name)
        if column is None:
            column = self._columns[name].take(self._index)
            column.flags.writeable = False
            self._gathered[name] = column
        return column


_COLUMNS: Mapping[str, tuple[str, Callable[[ScheduleRequest], float]]] = {
    "priority": ("i4", lambda row: row.priority),
    "arrived_time": ("f8", lambda row: row.arrived_time),
    "num_prompt_tokens": ("i4", lambda row: len(row.token_ids)),
    "num_tokens": ("i4", lambda row: row.num_tokens),
    "num_computed_tokens": ("i4", lambda row: row.num_computed_tokens),
    "num_blocks": ("i4", lambda row: row.num_blocks),
    "last_scheduled_step": ("i8", lambda row: row.last_scheduled_step),
    "predicted_remaining_tokens": (
        "f4",
        lambda row: float("nan") if (left := row.predicted_remaining_tokens) is None else left,
    ),
}


class _ObjectColumns(dict[str, Any]):
    """The columns of request objects, each made on demand."""

    def __init__(self, requests: tuple[ScheduleRequest, ...]) -> None:
        self._requests = requests

    def __missing__(self, name: str) -> Any:
        import numpy as np

        dtype, value = _COLUMNS[name]
        return np.fromiter(map(value, self._requests), dtype, len(self._requests))


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """One edit of a schedule: what a pass decided about some rows, or about a limit.

    | kind | target | value |
    |---|---|---|
    | `order` | `pending`, `running` | all rows in their new order |
    | `cap` | `pending`, `running` | tokens that each may compute in this step, at most |
    | `defer` | `pending` | why they are not admitted in this step |
    | `preempt` | `running` | `recompute` or `swap` |
    | `lower` | a limit | its new value |
    """

    kind: Literal["order", "cap", "defer", "preempt", "lower"]
    target: Part | Limit
    rows: npt.NDArray[Any]  # positions in the target, read-only; empty for a limit
    value: int | str | None = None
    made_by: str = ""  # the name of the pass; empty until it has been verified

    def __str__(self) -> str:
        made_by = f"{self.made_by}: " if self.made_by else ""
        rows = f" {_ranges(self.rows.tolist())}" if len(self.rows) else ""
        value = "" if self.value is None else f" = {self.value}"
        return f"{made_by}{self.kind} {self.target}{rows}{value}"


def _ranges(rows: list[int]) -> str:
    """Print `0 1 2 7` as `0-2 7`."""
    ranges: list[tuple[int, int]] = []
    for row in rows:
        if ranges and row == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], row)
        else:
            ranges.append((row, row))
    return " ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
