"""What to compute in the next step: rows in, decisions of passes about them, a plan out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, overload

from sagellm.core.errors import EngineError, InvalidInputError
from sagellm.core.namespace import DEFAULT, Namespace
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

        urgency = self.priority.astype(np.int64)  # the lowest int32 has no negative
        return np.lexsort((self.arrived_time, -urgency))

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
    probe: Probe | None = field(default=None, repr=False)
    state: Any = field(default=None, repr=False)
    """The value that `start` of the running pass returned; private to it and kept across steps."""
    decisions: tuple[Decision, ...] = ()

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
        """Let each of these requests compute at most this many tokens in this step; at least 1."""
        ir = self._decide("cap", "pending", pending, num_tokens)
        return ir._decide("cap", "running", running, num_tokens)

    def defer(self, rows: Rows, reason: str) -> ScheduleIR:
        """Do not admit these waiting requests in this step; others may overtake them."""
        return self._decide("defer", "pending", rows, reason)

    def preempt(self, rows: Rows, way: Literal["recompute", "swap"] = "recompute") -> ScheduleIR:
        """Take the blocks of these running requests before anything else is decided.

        `swap` says that their KV is worth keeping; schedulers may still recompute it.
        """
        return self._decide("preempt", "running", rows, way)

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
                ir = replace(ir._decide("lower", limit, (), value), **{limit: value})  # type: ignore[arg-type]
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

    def caps(self, part: Part) -> Ints:
        """Return the most tokens that each row may compute: (rows,), 2³¹ - 1 if there is no cap."""
        import numpy as np

        caps = np.full(len(getattr(self, part)), 2**31 - 1, np.int32)
        for decision in self.decisions:
            if (decision.kind, decision.target) == ("cap", part):
                caps[decision.rows] = np.minimum(caps[decision.rows], int(decision.value or 0))
        return caps

    def to_text(self) -> str:
        """Print the limits, the rows in their orders, and the decisions, one per line."""
        lines = [
            f"step {self.step} at {self.now:.3f} s: available={self.available_memory} "
            f"tokens={self.max_num_batched_tokens} seats={self.max_num_seqs} block={self.block_size}"
        ]
        for part, order in (("running", self.preemption), ("pending", self.admission)):
            for row in order.tolist():
                request = getattr(self, part)[row]
                lines.append(
                    f"  {part} {row} {request.request_id} tokens={request.num_tokens} "
                    f"computed={request.num_computed_tokens} hit={request.prefix_cache_hit} "
                    f"priority={request.priority}"
                )
        return "\n".join([*lines, *(f"  {decision}" for decision in self.decisions)])

    def _decide(
        self, kind: Any, target: Part | Limit, rows: Rows, value: int | str | None = None
    ) -> ScheduleIR:
        positions = self._positions(target, rows)
        if not len(positions) and kind not in ("order", "lower"):
            return self
        return replace(self, decisions=(*self.decisions, Decision(kind, target, positions, value)))

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
class SchedulerMetrics:
    """Counts since the scheduler was made. Batching efficiency is explained in `sagellm.core.metrics`."""

    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_admitted: int = 0
    num_preempted: int = 0
    num_idle_steps: int = 0  # with nothing to compute
    last_schedule_ns: int = 0


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


class SchedulerIRProtocol(ABC):
    """Decides what the next step computes.

    Providers are called as `factory(max_num_batched_tokens=..., max_num_seqs=..., block_size=...,
    probe=..., epoch=..., clock=...)`. The engine calls `schedule` once per step with rows of the
    current state; the scheduler decides from numbers alone, allocates nothing and writes to nothing.
    The plan fits: it needs no more than `available_memory` blocks after its own preemptions,
    no more tokens than the budget and no more seats than there are. Every running request
    that has something to compute gets its turn within a bounded number of steps, and so does the
    first waiting one, provided that the engine has refused requests that can never fit.

    `probe` is called for a waiting request just before it is considered, and when a pass calls
    `ir.hits`. An answer may be kept while `epoch()` returns the same number, which must change
    whenever an answer could; without an epoch, until the end of the step.

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


class _BrokenRule(Exception):
    """Says which rule a pass broke, and how."""

    def __init__(self, rule: str, how: str) -> None:
        super().__init__(f"broke the rule {rule!r}: {how}")


def verify_rewrite(name: str, before: ScheduleIR, after: object) -> ScheduleIR:
    """Return `before` with the new decisions of `after`, signed by the pass called `name`.

    Every scheduler runs it after every pass. Raises EngineError with the names of the pass and of the
    rule that it broke. O(rows decided on).
    """
    try:
        if not isinstance(after, ScheduleIR):
            raise _BrokenRule("a pass returns a ScheduleIR", f"it returned {type(after).__name__}")
        new = _new_decisions(before, after)
        for decision in new:
            _check(decision, before)
        _check_given(before, after, new)
    except _BrokenRule as broken:
        raise EngineError(f"scheduler pass {name!r} {broken}") from None
    if not new:
        return before
    signed = tuple(replace(decision, made_by=name) for decision in new)
    lowered: dict[str, Any] = {each.target: each.value for each in new if each.kind == "lower"}
    return replace(before, decisions=before.decisions + signed, **lowered)


def _new_decisions(before: ScheduleIR, after: ScheduleIR) -> tuple[Decision, ...]:
    if not isinstance(after.decisions, tuple):
        raise _BrokenRule("decisions are a tuple", f"it returned {type(after.decisions).__name__}")
    num_old = len(before.decisions)
    kept, new = after.decisions[:num_old], after.decisions[num_old:]
    if [*map(id, kept)] != [*map(id, before.decisions)]:
        raise _BrokenRule("what earlier passes decided stands", "it dropped or replaced a decision")
    return new


def _check_given(before: ScheduleIR, after: ScheduleIR, new: tuple[Decision, ...]) -> None:
    """Compare everything but the decisions with the input and the effects of `lower`."""
    for name in ("pending", "running", "probe", "state"):
        if getattr(after, name) is not getattr(before, name):
            raise _BrokenRule("a pass changes nothing but decisions", f"it replaced {name}")
    lowered = {str(each.target): each.value for each in new if each.kind == "lower"}
    for name in (*LIMITS, "block_size", "step", "now"):
        expected, found = lowered.get(name, getattr(before, name)), getattr(after, name)
        if found != expected:
            hint = f"ir.lower({name}=...)" if name in LIMITS else "nothing"
            raise _BrokenRule(
                "a pass changes nothing but decisions",
                f"it set {name} to {found} in place of {expected}; what may change it is {hint}",
            )


def _check(decision: Decision, before: ScheduleIR) -> None:
    if not isinstance(decision, Decision):
        raise _BrokenRule("a decision is a Decision", f"it added {type(decision).__name__}")
    targets = _TARGETS.get(decision.kind) if isinstance(decision.kind, str) else None
    if targets is None:
        raise _BrokenRule(
            "a decision is of a known kind", f"it is {decision.kind!r}, not one of {sorted(_TARGETS)}"
        )
    if decision.target not in targets:
        raise _BrokenRule(
            f"{decision.kind} is for {' or '.join(targets)}", f"it was decided for {decision.target!r}"
        )
    if decision.kind == "lower":
        _check_number(decision, "limits only go down", 0, getattr(before, decision.target))
        return
    _check_rows(decision, len(getattr(before, decision.target)))
    if decision.kind == "cap":
        _check_number(decision, "a cap lets a request advance", 1, MAX_CAP)
    elif decision.kind == "preempt" and decision.value not in WAYS:
        raise _BrokenRule("preemption is by recompute or swap", f"it chose {decision.value!r}")
    elif decision.kind == "defer" and not (isinstance(decision.value, str) and decision.value):
        raise _BrokenRule("a deferral has a reason", f"it gave {decision.value!r}")


def _check_number(decision: Decision, rule: str, least: int, most: int) -> None:
    value = decision.value
    if not isinstance(value, Integral) or not least <= int(value) <= most:
        raise _BrokenRule(
            rule, f"it set {decision.kind} {decision.target} to {value!r}; possible is {least} … {most}"
        )


def _check_rows(decision: Decision, num_rows: int) -> None:
    """Check that rows are positions, each named once, and that an order names all of them."""
    import numpy as np

    rows, target = decision.rows, decision.target
    if getattr(rows, "ndim", None) != 1 or rows.dtype.kind not in "iu":
        raise _BrokenRule("rows are positions", f"it named {target} rows by {rows!r}")
    invented = rows[(rows < 0) | (rows >= num_rows)]
    if len(invented):
        raise _BrokenRule(
            "rows are those that were given",
            f"there are {num_rows} {target} rows, and none is {_some(invented)}",
        )
    counts = np.bincount(rows, minlength=num_rows)
    doubled = np.flatnonzero(counts > 1)
    if len(doubled):
        raise _BrokenRule("a row is named once", f"it named {target} rows twice: {_some(doubled)}")
    if decision.kind == "order" and len(rows) != num_rows:
        raise _BrokenRule(
            "an order keeps all rows", f"it lost {target} rows: {_some(np.flatnonzero(counts == 0))}"
        )


def _some(rows: npt.NDArray[Any]) -> str:
    shown = ", ".join(map(str, rows[:8].tolist()))
    return f"{shown}, … ({len(rows)} of them)" if len(rows) > 8 else shown


_TARGETS: Mapping[str, tuple[str, ...]] = {
    "order": ("pending", "running"),
    "cap": ("pending", "running"),
    "defer": ("pending",),
    "preempt": ("running",),
    "lower": LIMITS,
}
