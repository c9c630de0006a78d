"""What to compute in the next step: requests in, a plan out, nothing touched."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from sagellm.core.tokens import TokenIdsLike


@dataclass(slots=True, eq=False)
class ScheduleRequest:
    """A request as the scheduler sees it. The engine keeps one a sequence and updates it.

    `kv_blocks_needed` of a waiting request is what its admission takes out of the available
    memory: blocks to allocate plus cached blocks that its lock makes unavailable. None lets the
    scheduler derive it from the tokens and the hit. Times are seconds on the engine's clock.
    """

    request_id: str
    token_ids: TokenIdsLike  # the prompt
    max_tokens: int
    priority: int = 0  # larger is more urgent
    arrived_time: float = 0.0
    prefix_cache_hit: int = 0  # tokens
    kv_blocks_needed: int | None = None
    num_tokens: int = 0  # prompt + generated so far; 0 means the prompt alone
    num_computed_tokens: int = 0  # whose KV is there
    num_blocks: int = 0  # held
    last_scheduled_step: int = -1
    predicted_remaining_tokens: float | None = None

    def __post_init__(self) -> None:
        if self.num_tokens == 0:
            self.num_tokens = len(self.token_ids)


class ScheduledRequest(NamedTuple):
    """Compute `num_tokens` more tokens of a request, after giving it `num_new_blocks`.

    For a running request these are blocks to allocate. For an admitted one they are what its
    admission takes out of the available memory: the blocks of all its tokens, of which the hit may
    cover some.
    """

    request: ScheduleRequest
    num_tokens: int
    num_new_blocks: int

    @property
    def request_id(self) -> str:
        """The id of the request."""
        return self.request.request_id


@dataclass(frozen=True, kw_only=True)
class SchedulePlan:
    """The decision for one step.

    Preempted requests give up their blocks first and are computed again later; then running
    requests and after them admitted ones get theirs. `deferred_reason` says why the first request
    that stays waiting was not admitted: "tokens", "seats", "blocks" or "preemption".
    """

    scheduled_requests: Sequence[ScheduledRequest]
    preempted_requests: Sequence[ScheduleRequest] = ()
    num_admitted: int = 0  # the last ones of scheduled_requests
    num_deferred: int = 0
    deferred_reason: str | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return sum(entry.num_tokens for entry in self.scheduled_requests)


@dataclass(frozen=True, kw_only=True)
class ScheduleIR:
    """The intermediate representation that passes rewrite.

    `pending` stands in the order of admission, `running` in the order of preemption, the last
    one first. A pass may lower the limits for this step and never raises them.
    """

    pending: tuple[ScheduleRequest, ...]
    running: tuple[ScheduleRequest, ...]
    available_memory: int  # blocks
    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int
    annotations: dict[str, str] = field(default_factory=dict)

    def with_pending(self, pending: Sequence[ScheduleRequest]) -> ScheduleIR:
        """Return a copy with another order of admission."""
        return replace(self, pending=tuple(pending))

    def to_text(self) -> str:
        """Print the IR, one request a line."""
        lines = [
            f"schedule available={self.available_memory} tokens={self.max_num_batched_tokens} "
            f"seats={self.max_num_seqs} block={self.block_size}"
        ]
        for label, requests in (("running", self.running), ("pending", self.pending)):
            lines += [
                f"  {label} {r.request_id} tokens={r.num_tokens} computed={r.num_computed_tokens} "
                f"hit={r.prefix_cache_hit} priority={r.priority}"
                for r in requests
            ]
        return "\n".join(lines)


@dataclass(kw_only=True)
class SchedulerMetrics:
    """Counts since the scheduler was made. Batching efficiency is explained in `sagellm.core.metrics`."""

    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_admitted: int = 0
    num_preempted: int = 0
    num_idle_steps: int = 0  # with nothing to compute
    last_schedule_ns: int = 0


Probe = Callable[[ScheduleRequest], None]
"""Updates `prefix_cache_hit` and `kv_blocks_needed` of a waiting request that is about to be considered."""


class SchedulerPassProtocol(ABC):
    """Rewrites a schedule: reorders, annotates, never loses or invents a request.

    Providers are called as `factory(**options)`. A pass is a frozen dataclass whose fields are
    its options. It must not keep a request waiting for ever: whatever it puts off, age brings
    forward.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The name in configurations and printed pipelines."""

    @abstractmethod
    def run(self, ir: ScheduleIR) -> ScheduleIR:
        """Return the rewritten schedule; `ir` itself is left alone."""


@dataclass(frozen=True)
class NullSchedulerPass(SchedulerPassProtocol):
    """Changes nothing."""

    @property
    def name(self) -> str:
        """`null`."""
        return "null"

    def run(self, ir: ScheduleIR) -> ScheduleIR:
        """Return the same schedule."""
        return ir


class SchedulerIRProtocol(ABC):
    """Decides what the next step computes.

    Providers are called as `factory(max_num_batched_tokens=..., max_num_seqs=..., block_size=...,
    probe=..., clock=...)`. The engine calls `schedule` once a step with the same, updated objects;
    the scheduler decides from numbers alone, allocates nothing and writes nothing but
    `last_scheduled_step`. The plan fits: it needs no more than `available_memory` blocks after the
    preemptions that it orders, no more tokens than the budget and no more seats than there are.
    Every running request that has something to compute gets its turn within a bounded number of
    steps, and so does the first waiting one, provided that the engine has refused what can never
    fit.

    A plan counts all blocks of a preempted request as free, though shared ones may stay in use. The
    engine therefore frees first and allocates in the order of the plan; where an allocation fails,
    it drops the rest of the plan and asks for another with the exact available memory.
    """

    @abstractmethod
    def add_optimization_pass(self, optimization_pass: SchedulerPassProtocol) -> None:
        """Append a pass to the pipeline."""

    @abstractmethod
    def apply_pass(self, optimization_pass: SchedulerPassProtocol, ir: ScheduleIR) -> ScheduleIR:
        """Run one pass and verify what it returns. Raises EngineError if a request got lost."""

    @abstractmethod
    def schedule(
        self,
        *,
        pending_requests: Sequence[ScheduleRequest],
        running_requests: Sequence[ScheduleRequest],
        available_memory: int,
    ) -> SchedulePlan:
        """Plan one step. `available_memory` counts blocks that are free or evictable.

        Raises InvalidInputError when it is negative, EngineError when a pass breaks its contract.
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
        """Return the same schedule."""
        return ir

    def schedule(
        self,
        *,
        pending_requests: Sequence[ScheduleRequest],
        running_requests: Sequence[ScheduleRequest],
        available_memory: int,
    ) -> SchedulePlan:
        """Put everything off."""
        return SchedulePlan(scheduled_requests=(), num_deferred=len(pending_requests))

    def metrics(self) -> SchedulerMetrics:
        """Return zeros."""
        return SchedulerMetrics()
