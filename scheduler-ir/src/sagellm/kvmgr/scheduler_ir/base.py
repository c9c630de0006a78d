"""The scheduler called `base`: continuous batching on an intermediate representation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from sagellm.core.errors import ConfigError, InvalidInputError
from sagellm.core.logging import get_logger
from sagellm.core.protocols.request_rows import Probe, RequestRows, ScheduleRequest
from sagellm.core.protocols.scheduler_ir import (
    PassWatcher,
    ScheduleIR,
    SchedulePlan,
    SchedulerIRProtocol,
    SchedulerMetrics,
    SchedulerPassProtocol,
)
from sagellm.core.runtime import Clock, SystemClock
from sagellm.core.step_cost import StepCost
from sagellm.kvmgr.scheduler_ir.hits import PrefixHits
from sagellm.kvmgr.scheduler_ir.pipeline import PassPipeline, apply_pass
from sagellm.kvmgr.scheduler_ir.step import Step

_logger = get_logger(__name__)


class BaseSchedulerIR(SchedulerIRProtocol):
    """Continuous batching with chunked prefill and preemption, by recompute unless a pass decides on swap.

    A step first serves running requests, then admits waiting ones in order. While the token
    budget covers all running requests, each of them gets at least one token in every step; with
    a smaller budget they take turns. A request that lacks blocks takes them from the request with the
    lowest priority and latest arrival, itself included. Admission reserves the blocks for all
    tokens of a request, stops at the first request that does not fit and pauses in a step
    that preempts for lack of blocks.

    Passes run first and decide on orders, caps, deferrals, preemptions, swaps and lower limits. A step costs
    a few array operations on the columns of running requests and one iteration of Python for each admitted
    request, and for each running one if blocks are short. Only passes read the rows of requests that stay
    waiting. Not thread-safe: one engine, one scheduler.
    """

    def __init__(  # noqa: PLR0913
        self,
        max_num_batched_tokens: int = 2048,
        max_num_seqs: int = 256,
        block_size: int = 16,
        *,
        probe: Probe | None = None,
        epoch: Callable[[], int] | None = None,
        clock: Clock | None = None,
        cost: Callable[[], StepCost | None] | None = None,
        step_target_ms: float | None = None,
    ) -> None:
        _at_least_one("max_num_batched_tokens", max_num_batched_tokens)
        _at_least_one("max_num_seqs", max_num_seqs)
        _at_least_one("block_size", block_size)
        self._hits = PrefixHits(probe, self._step_number if epoch is None else epoch, block_size)
        self._clock = SystemClock() if clock is None else clock
        self._cost, self._step_target_ms = cost, step_target_ms
        nothing = RequestRows.of(())
        self._template = ScheduleIR(
            pending=nothing,
            running=nothing,
            available_memory=0,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            block_size=block_size,
            step_target_ms=step_target_ms,
            probe=self._hits,
        )
        self.pipeline = PassPipeline(self._clock)
        self._metrics = SchedulerMetrics()
        _logger.info(
            "a step has at most %d tokens of at most %d requests, in blocks of %d tokens%s",
            max_num_batched_tokens,
            max_num_seqs,
            block_size,
            "" if step_target_ms is None else f", and should take {step_target_ms:g} ms",
        )

    def add_optimization_pass(self, optimization_pass: SchedulerPassProtocol) -> None:
        """Append a pass to the pipeline, with a new state. Raises ConfigError for any other object."""
        self.pipeline.add(optimization_pass)

    def watch(self, watcher: PassWatcher | str) -> None:
        """Show what every pass decides, from the next step on; a text names one of `PASS_WATCHERS`.

        Raises ConfigError for another text.
        """
        if isinstance(watcher, str):
            from sagellm.kvmgr.scheduler_ir.schedule_watchers import PASS_WATCHERS

            if watcher not in PASS_WATCHERS:
                raise ConfigError(f"no watcher is called {watcher!r}; there are {', '.join(PASS_WATCHERS)}")
            watcher = PASS_WATCHERS[watcher]()
        self.pipeline.watch(watcher)

    def set_passes(self, passes: Sequence[SchedulerPassProtocol]) -> None:
        """Replace all passes from the next step on; one equal to a present pass keeps its state and counts.

        If a pass is refused, the old ones stay. Raises ConfigError for any other object.
        """
        self.pipeline = self.pipeline.replaced_by(passes)

    def lengthen_steps(self, factor: float) -> None:
        """Give passes so many times the target from the next step on."""
        if self._step_target_ms is not None:
            self._template = self._template.updated(step_target_ms=factor * self._step_target_ms)

    def apply_pass(self, optimization_pass: SchedulerPassProtocol, ir: ScheduleIR) -> ScheduleIR:
        """Run one pass and verify what it decided, with a new state if `ir.state` is None.

        Raises PassError, which has the pass, the rule that it broke or its exception.
        """
        return apply_pass(optimization_pass, ir)

    def schedule(
        self,
        *,
        pending_requests: Sequence[ScheduleRequest],
        running_requests: Sequence[ScheduleRequest],
        available_memory: int,
    ) -> SchedulePlan:
        """Plan one step. `available_memory` counts blocks that are free or evictable.

        Raises InvalidInputError when it is negative, PassError when a pass fails or breaks its contract.
        """
        started_ns = self._clock.now_ns()
        if available_memory < 0:
            raise InvalidInputError(f"available_memory is {available_memory} blocks; it must not be negative")
        ir = self._template.updated(
            pending=RequestRows.of(pending_requests),
            running=RequestRows.of(running_requests),
            available_memory=available_memory,
            step=self._metrics.num_steps,
            now=started_ns / 1e9,
            cost=None if self._cost is None else self._cost(),
            epoch=self._hits.epoch(),
        )
        ir = self.pipeline.run(ir)
        step = Step(ir, self._hits, may_repeat=self.pipeline.may_repeat)
        plan = step.plan()
        self.pipeline.observe(plan)
        self._count(plan, step.num_tokens)
        self._metrics.last_schedule_ns = self._clock.now_ns() - started_ns
        return plan

    def repeat(self, plan: SchedulePlan, num_steps: int) -> None:
        """Count so many more steps of a steady plan, in which all passes rest."""
        self._metrics.num_steps += num_steps
        self._metrics.num_scheduled_tokens += num_steps * len(plan.rows)

    def metrics(self) -> SchedulerMetrics:
        """Return a copy of the counts so far."""
        return replace(self._metrics, passes=self.pipeline.metrics())

    def _step_number(self) -> int:
        return self._metrics.num_steps

    def _count(self, plan: SchedulePlan, num_tokens: int) -> None:
        metrics = self._metrics
        metrics.num_steps += 1
        metrics.num_scheduled_tokens += num_tokens
        metrics.num_admitted += plan.num_admitted
        metrics.num_preempted += len(plan.preempted)
        metrics.num_idle_steps += not num_tokens
        if num_preempted := len(plan.preempted):
            _logger.debug("step %d preempts %d requests", metrics.num_steps - 1, num_preempted)


def _at_least_one(key: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{key} is {value}; it must be at least 1")
