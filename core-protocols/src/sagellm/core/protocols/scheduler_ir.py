"""What to compute in the next step: rows in, decisions of passes about them, a plan out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeAlias, overload

from sagellm.core.errors import ConfigError, InvalidInputError
from sagellm.core.namespace import DEFAULT, Namespace
from sagellm.core.step_cost import StepCost
from sagellm.core.tenant import DEFAULT_TENANT, Tenant, hash_of
from sagellm.core.tokens import TokenIdsLike, pack

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Rows: TypeAlias = Sequence[int] | npt.NDArray[Any]
    Ints = npt.NDArray[np.int32]

# numpy is imported by the functions that make arrays, so that core alone needs none.

Part = Literal["pending", "running"]
Limit = Literal["available_memory", "max_num_batched_tokens", "max_num_seqs"]
LIMITS: tuple[Limit, ...] = ("available_memory", "max_num_batched_tokens", "max_num_seqs")
DeferredReason = Literal["tokens", "seats", "blocks", "preemption", "pass"]
WAYS = ("recompute", "swap")
MAX_CAP = 2**31 - 1


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
    confidence: float | None = None  # of that prediction, 0 to 1
    deadline: float | None = None  # for the whole answer
    namespace: Namespace = DEFAULT
    tenant: Tenant = DEFAULT_TENANT

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
    `make(index[i])`. A row never read costs nothing; `len` is O(1). `kept` may be shared by successive rows
    of the same requests: it takes what was gathered of everything but CHANGING_COLUMNS.
    """

    __slots__ = ("_columns", "_gathered", "_index", "_kept", "_make")

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
    def num_missing(self) -> Ints:
        """Tokens that can be computed: 1 for a decode, 0 for a request that waits for a step in flight."""
        missing: Ints | None = self._gathered.get("num_missing")
        if missing is None:
            import numpy as np

            missing = np.maximum(self.num_tokens - self.num_computed_tokens, 0)
            missing.flags.writeable = False
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

    @property
    def confidence(self) -> npt.NDArray[np.float32]:
        """Of the predictions, 0 to 1; 0 if unknown."""
        column: npt.NDArray[np.float32] = self._column("confidence")
        return column

    @property
    def max_tokens(self) -> Ints:
        """Output tokens at which each ends at the latest."""
        column: Ints = self._column("max_tokens")
        return column

    @property
    def deadline(self) -> npt.NDArray[np.float64]:
        """Seconds on the engine's clock; infinite if there is none."""
        column: npt.NDArray[np.float64] = self._column("deadline")
        return column

    @property
    def tenant(self) -> npt.NDArray[np.int64]:
        """`Tenant.code` of each."""
        column: npt.NDArray[np.int64] = self._column("tenant")
        return column

    @property
    def has_one_tenant(self) -> bool:
        """Whether all rows are of the same tenant; true if there are none."""
        is_one = self._kept.get("has_one_tenant")
        if is_one is None:
            tenant = self.tenant
            is_one = not len(tenant) or bool((tenant == tenant[0]).all())
            self._kept["has_one_tenant"] = is_one
        return bool(is_one)

    @property
    def weight(self) -> npt.NDArray[np.float32]:
        """The weight of each one's tenant."""
        column: npt.NDArray[np.float32] = self._column("weight")
        return column

    @property
    def is_trusted(self) -> npt.NDArray[np.bool_]:
        """Whether each one's tenant is trusted."""
        column: npt.NDArray[np.bool_] = self._column("is_trusted")
        return column

    @property
    def key(self) -> npt.NDArray[np.int64]:
        """A number that stands for the request as long as it lives: `hash_of(request_id)`."""
        column: npt.NDArray[np.int64] = self._column("key")
        return column

    def by_rank(self) -> npt.NDArray[np.intp]:
        """Return the positions in order of rank: priority, then arrival, then position."""
        import numpy as np

        urgency = self.priority.astype(np.int64)  # the lowest int32 has no negative
        return np.lexsort((self.arrived_time, -urgency))

    def _column(self, name: str) -> Any:
        gathered = self._gathered if name in CHANGING_COLUMNS else self._kept
        column = gathered.get(name)
        if column is None:
            column = self._columns[name].take(self._index)
            column.flags.writeable = False
            gathered[name] = column
        return column


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


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """One edit of a schedule: what a pass decided about some rows, or about a limit.

    | kind | target | value |
    |---|---|---|
    | `order` | `pending`, `running` | all rows in their new order |
    | `cap` | `pending`, `running` | tokens that each may compute in this step, at most |
    | `defer` | `pending` | why they are not admitted in this step |
    | `preempt` | `running` | `recompute` or `swap` |
    | `swap` | `running` | nothing: if they are preempted, it is by swap |
    | `lower` | a limit | its new value |
    """

    kind: Literal["order", "cap", "defer", "preempt", "swap", "lower"]
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


@dataclass(frozen=True, kw_only=True, eq=False)
class ScheduleIR:
    """The intermediate representation of a step: its inputs, and the decisions of passes so far.

    The edits (`order_pending`, `cap`, `defer`, …) return a new IR with one more decision. Rows are
    positions in `pending` or `running`, in any sequence of ints or as a mask over all of them. What
    earlier passes decided stands: a new order replaces the old one, the smallest of several caps applies, and
    limits only go down.
    """

    pending: RequestRows
    running: RequestRows
    available_memory: int  # blocks
    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int
    step: int = 0
    now: float = 0.0  # seconds on the engine's clock
    cost: StepCost | None = None  # what steps take here, once that is known
    step_target_ms: float | None = None  # how long a step may take while others decode or wait
    probe: Probe | None = field(default=None, repr=False)
    epoch: int | None = None  # changes whenever an answer of `hits` may
    state: Any = field(default=None, repr=False)
    """The value that `start` of the running pass returned; private to it and kept across steps."""
    decisions: tuple[Decision, ...] = ()

    def with_state(self, state: Any) -> Self:
        """Return the same schedule with the state of the pass that runs next."""
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__, state=state)
        return copy

    @property
    def num_free_seats(self) -> int:
        """Seats for waiting requests, once the preempted ones have left theirs."""
        num_free = self.max_num_seqs - len(self.running)
        return num_free + len(self.preempted) if self.decisions else num_free

    @property
    def can_admit(self) -> bool:
        """Whether a waiting request could be admitted at all; if not, their order decides nothing."""
        return len(self.pending) > 0 and self.num_free_seats > 0

    def hits(self, rows: Rows) -> list[PrefixHit]:
        """Query the prefix cache for waiting requests; answers are kept until the cache changes."""
        ask = self.probe or (lambda request: request.stated_hit(self.block_size))
        return [ask(self.pending[row]) for row in self._positions("pending", rows).tolist()]

    def order_pending(self, rows: Rows) -> ScheduleIR:
        """Set the order of admission; `rows` has each waiting request once."""
        return self._decide("order", "pending", rows)

    def order_running(self, rows: Rows) -> ScheduleIR:
        """Set the order of preemption, last row first; `rows` has each running request once."""
        return self._decide("order", "running", rows)

    def cap(self, num_tokens: int, *, pending: Rows = (), running: Rows = ()) -> ScheduleIR:
        """Let each of these requests compute at most this many tokens in this step.

        With 0, running ones sit the step out; it is not for waiting ones, which can be deferred.
        """
        ir = self._decide("cap", "pending", pending, num_tokens)
        return ir._decide("cap", "running", running, num_tokens)

    def defer(self, rows: Rows, reason: str) -> ScheduleIR:
        """Do not admit these waiting requests in this step; others may overtake them."""
        return self._decide("defer", "pending", rows, reason)

    def preempt(self, rows: Rows, way: Literal["recompute", "swap"] = "recompute") -> ScheduleIR:
        """Take the blocks of these running requests before anything else is decided.

        `swap` says that their KV is worth keeping; an engine without a place for it computes it again.
        """
        return self._decide("preempt", "running", rows, way)

    def swap(self, rows: Rows) -> ScheduleIR:
        """Preempt these running requests by swap if they are preempted in this step, for whatever reason."""
        return self._decide("swap", "running", rows)

    def lower(
        self,
        *,
        available_memory: int | None = None,
        max_num_batched_tokens: int | None = None,
        max_num_seqs: int | None = None,
    ) -> ScheduleIR:
        """Lower limits for this step."""
        ir, values = self, (available_memory, max_num_batched_tokens, max_num_seqs)
        for limit, value in zip(LIMITS, values, strict=True):
            if value is not None and value != getattr(self, limit):
                ir = ir._decide("lower", limit, (), value).updated(**{limit: value})
        return ir

    @cached_property
    def admission(self) -> npt.NDArray[np.intp]:
        """All waiting rows in the order of admission, deferred ones included."""
        return self._order("pending")

    @cached_property
    def preemption(self) -> npt.NDArray[np.intp]:
        """All running rows, the last of which is preempted first; by rank unless a pass decides otherwise."""
        return self._order("running")

    @cached_property
    def deferred(self) -> dict[int, str]:
        """The waiting rows not admitted in this step, and why."""
        return self._values("defer")

    @cached_property
    def preempted(self) -> dict[int, str]:
        """The running rows that passes preempt, and how."""
        return self._values("preempt")

    @cached_property
    def swapped(self) -> frozenset[int]:
        """The running rows whose KV is kept if they are preempted."""
        marked = (each.rows.tolist() for each in self.decisions if each.kind == "swap")
        return frozenset(row for row, way in self.preempted.items() if way == "swap").union(*marked)

    def caps(self, part: Part) -> Ints:
        """Return the most tokens that each row may compute: (rows,), 2³¹ - 1 if there is no cap."""
        import numpy as np

        caps = np.full(len(getattr(self, part)), 2**31 - 1, np.int32)
        for decision in self.decisions:
            if (decision.kind, decision.target) == ("cap", part):
                caps[decision.rows] = np.minimum(caps[decision.rows], int(decision.value or 0))
        return caps

    def to_text(self) -> str:
        """Print limits, rows and decisions; `schedule_from_text` reads them back."""
        from sagellm.core.schedule_text import schedule_to_text

        return schedule_to_text(self)

    def updated(self, **values: Any) -> Self:
        """Return a copy with other values: `replace`, for fields only, in 1 µs."""
        copy = object.__new__(type(self))
        fields = copy.__dict__
        fields.update(self.__dict__)
        for name in _DERIVED_FROM_DECISIONS:
            fields.pop(name, None)
        fields.update(values)
        return copy

    def _decide(
        self, kind: Any, target: Part | Limit, rows: Rows, value: int | str | None = None
    ) -> ScheduleIR:
        positions = self._positions(target, rows)
        if not len(positions) and kind not in ("order", "lower"):
            return self
        return self.updated(decisions=(*self.decisions, Decision(kind, target, positions, value)))

    def _positions(self, target: Part | Limit, rows: Rows) -> npt.NDArray[Any]:
        import numpy as np

        positions = np.array(rows) if len(rows) else np.empty(0, np.intp)
        if positions.dtype == bool:
            if len(positions) != len(getattr(self, target)):
                raise InvalidInputError(
                    f"a mask over the {target} rows has {len(positions)} values; "
                    f"it must have {len(getattr(self, target))}"
                )
            positions = np.flatnonzero(positions)
        positions.flags.writeable = False
        return positions

    def _order(self, part: Part) -> npt.NDArray[np.intp]:
        import numpy as np

        for decision in reversed(self.decisions):
            if (decision.kind, decision.target) == ("order", part):
                return decision.rows
        order = self.running.by_rank() if part == "running" else np.arange(len(self.pending))
        order.flags.writeable = False
        return order

    def _values(self, kind: str) -> dict[int, str]:
        return {
            row: str(decision.value)
            for decision in self.decisions
            if decision.kind == kind
            for row in decision.rows.tolist()
        }


_DERIVED_FROM_DECISIONS = ("admission", "preemption", "deferred", "preempted", "swapped")


class Admission(NamedTuple):
    """Admit a waiting request and compute `num_tokens` of it, after the first `hit`.

    `num_new_blocks` is taken out of the available memory: the blocks of all its tokens,
    some of which the hit may cover.
    """

    row: int  # of the pending requests
    num_tokens: int
    num_new_blocks: int
    hit: int  # tokens that the prefix cache has


class ScheduledRequest(NamedTuple):
    """Compute `num_tokens` more tokens of a request, after giving it `num_new_blocks`."""

    request: ScheduleRequest
    num_tokens: int
    num_new_blocks: int

    @property
    def request_id(self) -> str:
        """The id of the request."""
        return self.request.request_id


@dataclass(frozen=True, kw_only=True, eq=False)
class SchedulePlan:
    """The decisions for one step, by positions in the given rows.

    Preempted requests give up their blocks first and are computed again later; then running
    requests get theirs, in the order of `rows`, and then admitted ones. The caller writes
    `step` to the `last_scheduled_step` of all requests that compute something.
    """

    pending: RequestRows = field(repr=False)
    running: RequestRows = field(repr=False)
    step: int = 0
    rows: Ints  # (served,) running rows that compute something
    num_tokens: Ints  # (served,) to compute
    num_new_blocks: Ints  # (served,) to allocate first
    admitted: Sequence[Admission] = ()
    preempted: Sequence[int] = ()  # running rows, in the order chosen
    swapped: Sequence[int] = ()  # those of the preempted rows whose KV is worth keeping
    preempted_for: Sequence[int] = ()
    """For each preempted row the running row that lacked blocks, itself if none was behind it; -1: a pass."""
    num_deferred: int = 0
    deferred_reason: DeferredReason | None = None
    """What ended admission; "pass" if it did not end early and passes deferred the rest."""
    decisions: Sequence[Decision] = ()
    """What passes decided, in order."""

    @property
    def num_admitted(self) -> int:
        """Waiting requests that begin to run."""
        return len(self.admitted)

    @property
    def num_scheduled_tokens(self) -> int:
        """Total tokens of the step."""
        return int(self.num_tokens.sum()) + sum(entry.num_tokens for entry in self.admitted)

    @cached_property
    def scheduled_requests(self) -> list[ScheduledRequest]:
        """Return all rows that compute something as objects, admitted last. Read before the plan is run."""
        served = zip(self.rows.tolist(), self.num_tokens.tolist(), self.num_new_blocks.tolist(), strict=True)
        return [
            *(ScheduledRequest(self.running[row], tokens, blocks) for row, tokens, blocks in served),
            *(
                ScheduledRequest(self.pending[row], tokens, blocks)
                for row, tokens, blocks, _ in self.admitted
            ),
        ]

    @cached_property
    def preempted_requests(self) -> list[ScheduleRequest]:
        """Return preempted requests as objects. Read it before executing the plan."""
        return [self.running[row] for row in self.preempted]


@dataclass(kw_only=True)
class PassMetrics:
    """What one pass of the pipeline has cost and decided."""

    name: str
    num_runs: int = 0
    num_decisions: int = 0
    total_ns: int = 0


@dataclass(kw_only=True)
class SchedulerMetrics:
    """Counts since the scheduler was made. Batching efficiency is explained in `sagellm.core.metrics`."""

    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_admitted: int = 0
    num_preempted: int = 0
    num_idle_steps: int = 0  # with nothing to compute
    last_schedule_ns: int = 0
    passes: list[PassMetrics] = field(default_factory=list)  # in the order in which they run


class SchedulerPassProtocol(ABC):
    """Edits the decisions of a step: orders, caps, deferrals, preemptions and lower limits.

    Providers are called as `factory()`. A pass is a frozen dataclass whose fields are its
    options. Rows are read-only; time is `ir.now`; state kept between steps is in `ir.state`.
    Equal histories give equal decisions.

    It must not starve a request: whatever it reorders, defers or preempts, age
    brings forward, and a limit that it lowers to 0 rises again.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The name in configurations and decision logs."""

    def start(self) -> Any:
        """Return the initial state of a scheduler's pass, available as `ir.state` at each step."""
        return None

    @abstractmethod
    def run(self, ir: ScheduleIR) -> ScheduleIR:
        """Return the IR with this pass's decisions; `ir` itself is unchanged."""

    def observe(self, plan: SchedulePlan, state: Any) -> None:  # noqa: B027  (most need not know)
        """Update the state by what the step will compute. Called after each plan, never by other passes."""


@dataclass(frozen=True)
class NullSchedulerPass(SchedulerPassProtocol):
    """Decides nothing."""

    @property
    def name(self) -> str:
        """`null`."""
        return "null"

    def run(self, ir: ScheduleIR) -> ScheduleIR:
        """Return the same IR."""
        return ir


PassWatcher = Callable[[str, ScheduleIR, ScheduleIR], None]
"""Called after each pass with its name and the schedule before and after it; must not raise."""


class SchedulerIRProtocol(ABC):
    """Decides what the next step computes.

    Providers are called as `factory(max_num_batched_tokens=..., max_num_seqs=..., block_size=...,
    probe=..., epoch=..., clock=..., cost=..., step_target_ms=...)`. The engine calls `schedule` once per
    step with rows of the current state; the scheduler decides from numbers alone, allocates nothing and
    writes to nothing.
    The plan fits: it needs no more than `available_memory` blocks after its own preemptions,
    no more tokens than the budget and no more seats than there are. Every running request
    that has something to compute gets its turn within a bounded number of steps, and so does the
    first waiting one, provided that the engine has refused requests that can never fit.

    `probe` is called for a waiting request just before it is considered, and when a pass calls
    `ir.hits`. An answer may be kept while `epoch()` returns the same number, which must change
    whenever an answer could; without an epoch, until the end of the step. `cost()` returns the cost model
    of a step, fitted to those of this engine, or None as long as too few have run.

    A plan counts all blocks of a preempted request as free, though shared ones may stay in use. The
    engine therefore frees first and allocates in the order of the plan; if an allocation fails,
    it drops the rest of the plan and requests another with the exact available memory.
    """

    @abstractmethod
    def add_optimization_pass(self, optimization_pass: SchedulerPassProtocol) -> None:
        """Append a pass to the pipeline, with a new state."""

    @abstractmethod
    def apply_pass(self, optimization_pass: SchedulerPassProtocol, ir: ScheduleIR) -> ScheduleIR:
        """Run one pass and verify what it decided, with a new state if `ir.state` is None.

        Raises EngineError, naming the pass, if it fails or breaks its contract.
        """

    @abstractmethod
    def schedule(
        self,
        *,
        pending_requests: Sequence[ScheduleRequest],
        running_requests: Sequence[ScheduleRequest],
        available_memory: int,
    ) -> SchedulePlan:
        """Plan one step. `available_memory` counts blocks that are free or evictable.

        RequestRows are used directly, other sequences through `RequestRows.of`. Raises InvalidInputError
        for negative memory, EngineError when a pass breaks its contract.
        """

    @abstractmethod
    def metrics(self) -> SchedulerMetrics:
        """Return the counts so far."""

    def watch(self, watcher: PassWatcher) -> None:
        """Show what every pass decides, from the next step on.

        Raises ConfigError unless this scheduler implements it.
        """
        raise ConfigError(f"the scheduler {type(self).__name__} does not show what its passes decide")

    def set_passes(self, passes: Sequence[SchedulerPassProtocol]) -> None:
        """Replace all passes from the next step on; one equal to a present pass keeps its state and counts.

        If a pass is refused, the old ones stay. Raises ConfigError then, and unless this scheduler implements
        it.
        """
        raise ConfigError(f"the scheduler {type(self).__name__} cannot change its passes while it runs")


class NullSchedulerIR(SchedulerIRProtocol):
    """Schedules nothing."""

    def __init__(self, **_: object) -> None:
        pass

    def add_optimization_pass(self, optimization_pass: SchedulerPassProtocol) -> None:
        """Ignore it."""

    def apply_pass(self, optimization_pass: SchedulerPassProtocol, ir: ScheduleIR) -> ScheduleIR:
        """Return the same IR."""
        return ir

    def schedule(
        self,
        *,
        pending_requests: Sequence[ScheduleRequest],
        running_requests: Sequence[ScheduleRequest],
        available_memory: int,
    ) -> SchedulePlan:
        """Admit and compute nothing."""
        import numpy as np

        nothing = np.empty(0, np.int32)
        return SchedulePlan(
            pending=RequestRows.of(pending_requests),
            running=RequestRows.of(running_requests),
            rows=nothing,
            num_tokens=nothing,
            num_new_blocks=nothing,
            num_deferred=len(pending_requests),
        )

    def metrics(self) -> SchedulerMetrics:
        """Return zeros."""
        return SchedulerMetrics()
