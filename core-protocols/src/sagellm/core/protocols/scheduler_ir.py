"""What to compute in the next step: rows in, decisions of passes about them, a plan out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeAlias

from sagellm.core.errors import ConfigError, InvalidInputError
from sagellm.core.plugins.options import check_fields
from sagellm.core.protocols.request_rows import PrefixHit, Probe, RequestRows, ScheduleRequest
from sagellm.core.step_cost import StepCost
from sagellm.core.unchecked import unchecked

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


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """One edit of a schedule: what a pass decided about some rows, or about a limit.

    | kind | target | value |
    |---|---|---|
    | `order` | `pending`, `running` | all rows in their new order |
    | `cap` | `pending`, `running` | tokens that each may compute in this step, at most |
    | `yield` | `running` | tokens that each may compute at most while one that it yields to is not deferred |
    | `defer` | `pending` | why they are not admitted in this step |
    | `preempt` | `running` | `recompute` or `swap` |
    | `swap` | `running` | nothing: if they are preempted, it is by swap |
    | `lower` | a limit | its new value |
    """

    kind: Literal["order", "cap", "yield", "defer", "preempt", "swap", "lower"]
    target: Part | Limit
    rows: npt.NDArray[Any]  # positions in the target, read-only; empty for a limit
    value: int | str | None = None
    made_by: str = ""  # the name of the pass; empty until it has been verified

    def __str__(self) -> str:
        from sagellm.core.number_ranges import ranges

        made_by = f"{self.made_by}: " if self.made_by else ""
        rows = f" {' '.join(ranges(self.rows.tolist()))}" if len(self.rows) else ""
        value = "" if self.value is None else f" = {self.value}"
        return f"{made_by}{self.kind} {self.target}{rows}{value}"


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
        return unchecked(type(self), self.__dict__, state=state)

    @property
    def num_free_seats(self) -> int:
        """Seats for waiting requests, once the preempted ones have left theirs."""
        num_free = self.max_num_seqs - len(self.running)
        return num_free + len(self.preempted) if self.decisions else num_free

    @property
    def can_admit(self) -> bool:
        """Whether a waiting request could be admitted at all; if not, their order decides nothing."""
        return len(self.pending) > 0 and self.num_free_seats > 0

    @property
    def is_calm(self) -> bool:
        """Whether nobody can be admitted, no prompt runs, and blocks suffice for a token of each request."""
        if self.can_admit or self.available_memory < len(self.running):
            return False
        return not self.running.num_prefills

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

    def yield_to_pending(self, num_tokens: int, running: Rows) -> ScheduleIR:
        """Cap these running requests, each only while a waiting one of its tenant, or one with a trusted
        priority, may be admitted: a later pass may defer those for whom it makes room.
        """
        return self._decide("yield", "running", running, num_tokens)

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
    def deferred(self) -> Mapping[int, str]:
        """The waiting rows not admitted in this step, and why."""
        return self._values("defer")

    @cached_property
    def preempted(self) -> Mapping[int, str]:
        """The running rows that passes preempt, and how."""
        return self._values("preempt")

    @cached_property
    def swapped(self) -> frozenset[int]:
        """The running rows whose KV is kept if they are preempted."""
        marked = (each.rows.tolist() for each in self.decisions if each.kind == "swap")
        return frozenset(row for row, way in self.preempted.items() if way == "swap").union(*marked)

    def caps(self, part: Part) -> Ints:
        """Return how many tokens each row may compute at most: (rows,), MAX_CAP for a row without a cap."""
        import numpy as np

        caps = np.full(len(getattr(self, part)), MAX_CAP, np.int32)
        for decision in self.decisions:
            if decision.target == part and decision.kind in ("cap", "yield"):
                rows = decision.rows if decision.kind == "cap" else self._yielding(decision.rows)
                caps[rows] = np.minimum(caps[rows], int(decision.value or 0))
        return caps

    def _yielding(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the running rows for whom a waiting request is there to yield to."""
        import numpy as np

        pending, may_start = self.pending, np.ones(len(self.pending), np.bool_)
        may_start[list(self.deferred)] = False
        if (may_start & pending.is_trusted & (pending.priority > 0)).any():
            return rows
        return rows[np.isin(self.running.tenant[rows], pending.tenant[may_start])]

    def updated(self, **values: Any) -> Self:
        """Return a copy with other values: `replace`, for fields only, in 1 µs."""
        copy = unchecked(type(self), self.__dict__, **values)
        for name in _DERIVED_FROM_DECISIONS:
            copy.__dict__.pop(name, None)
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
        positions.setflags(write=False)
        return positions

    def _order(self, part: Part) -> npt.NDArray[np.intp]:
        import numpy as np

        for decision in reversed(self.decisions):
            if (decision.kind, decision.target) == ("order", part):
                return decision.rows
        order = self.running.by_rank() if part == "running" else np.arange(len(self.pending))
        order.setflags(write=False)
        return order

    def _values(self, kind: str) -> Mapping[int, str]:
        """Return a read-only view, since later passes and the plan use the same one."""
        if not self.decisions:
            return _NONE
        values = {
            row: str(decision.value)
            for decision in self.decisions
            if decision.kind == kind
            for row in decision.rows.tolist()
        }
        return MappingProxyType(values)


_NONE: Mapping[int, str] = MappingProxyType({})
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
    is_steady: bool = False
    """Whether it also holds for the steps after this one, as `SchedulerIRProtocol.repeat` says."""

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
    """Counts since the scheduler was made. Batching efficiency is explained in `sagellm.engines.metrics`."""

    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_admitted: int = 0
    num_preempted: int = 0
    num_idle_steps: int = 0  # with nothing to compute
    last_schedule_ns: int = 0
    passes: list[PassMetrics] = field(default_factory=list)  # in the order in which they run


class SchedulerPassProtocol(ABC):
    """Edits the decisions of a step: orders, caps, deferrals, preemptions and lower limits.

    Providers are called as `factory()`. A pass is a frozen dataclass whose fields are its options, and are
    checked against their types and `Limits` when it is made. Rows are read-only; time is `ir.now`; state kept
    between steps is in `ir.state`. Equal histories give equal decisions.

    It must not starve a request: whatever it reorders, defers or preempts, age
    brings forward, and a limit that it lowers to 0 rises again.
    """

    def __post_init__(self) -> None:
        """Raise ConfigError for a field whose value is not what its type and limits say."""
        try:
            check_fields(self)
        except ConfigError as error:
            raise ConfigError(f"{self.name}: {error}") from None
        if (following := getattr(super(), "__post_init__", None)) is not None:
            following()

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

    def rests(self, state: Any) -> bool:
        """Say whether `run` and `observe` may be left out until a step is not calm (`ir.is_calm`).

        Asked after a calm step. They are called again as soon as others wait, too. True, if they would decide
        nothing until then, and leave a state that depends on the time alone: most passes decide only about
        requests that can be admitted, or lack blocks.
        """
        del state
        return False


STAGES = ("order", "share", "preempt", "chunk")
"""The passes that have a place of their own in the pipeline."""


def in_pipeline_order(stages: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return passes by stage, and those of `passes`, in the order in which they run; no pass is None."""
    order, *later = (stages.get(stage) for stage in STAGES)
    return tuple(each for each in (order, *stages.get("passes", ()), *later) if each is not None)


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

    def rests(self, state: None) -> bool:
        """Always."""
        return True


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

        Raises PassError if it fails or breaks its contract.
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
        for negative memory, PassError when a pass fails or breaks its contract: the engine then takes the
        pass out with `set_passes` and asks again.
        """

    @abstractmethod
    def metrics(self) -> SchedulerMetrics:
        """Return the counts so far."""

    def repeat(self, plan: SchedulePlan, num_steps: int) -> None:  # noqa: B027 - no plan need be steady
        """Count so many more steps of a plan that `is_steady`: the engine computes them without asking.

        Nothing waits and all running requests decode one token. It does so while that holds, no request ends
        and there is a free block for each, called right after the plan.
        """

    def watch(self, watcher: PassWatcher | str) -> None:
        """Show what every pass decides, from the next step on.

        A text is `scheduler.print`: what the scheduler itself prints on standard error. Raises ConfigError
        unless this scheduler implements it.
        """
        raise ConfigError(f"the scheduler {type(self).__name__} does not show what its passes decide")

    def set_passes(self, passes: Sequence[SchedulerPassProtocol]) -> None:
        """Replace all passes from the next step on; one equal to a present pass keeps its state and counts.

        If a pass is refused, the old ones stay. Raises ConfigError then, and unless this scheduler implements
        it.
        """
        raise ConfigError(f"the scheduler {type(self).__name__} cannot change its passes while it runs")

    def lengthen_steps(self, factor: float) -> None:  # noqa: B027 - there may be no target
        """Have steps take so many times their target from the next one on; 1: the target itself again.

        The engine calls it as somebody ceases or begins to see tokens as they come. A scheduler without a
        target ignores it.
        """


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
