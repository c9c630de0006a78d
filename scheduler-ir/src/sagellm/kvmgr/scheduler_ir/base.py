"""The scheduler called `base`: continuous batching on an intermediate representation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sagellm.core.checks import require_object
from sagellm.core.errors import ConfigError, EngineError, InvalidInputError
from sagellm.core.logging import get_logger
from sagellm.core.protocols.scheduler_ir import (
    Probe,
    ScheduleIR,
    SchedulePlan,
    ScheduleRequest,
    SchedulerIRProtocol,
    SchedulerMetrics,
    SchedulerPassProtocol,
)
from sagellm.core.runtime import Clock, SystemClock
from sagellm.kvmgr.scheduler_ir.preemption import preemption_order
from sagellm.kvmgr.scheduler_ir.step import Step
from sagellm.kvmgr.scheduler_ir.verify import verify_rewrite

_logger = get_logger(__name__)


class BaseSchedulerIR(SchedulerIRProtocol):
    """Continuous batching with chunked prefill and preemption by recompute.

    A step first serves running requests, then admits waiting ones in their order. While the token
    budget covers all running requests, each of them gets at least one token in every step; with
    a smaller budget they take turns. A request that lacks blocks takes them from the one of
    lowest priority and latest arrival, itself included. Admission reserves the blocks of all
    tokens that a request has, stops at the first request that does not fit and pauses in a step
    that preempts.

    Passes run before this, on a ScheduleIR that is built only where there are passes. They decide
    the order of admission and the order of preemption. O(running + admitted) a step without
    passes, O(running + waiting) with them. Not thread-safe: one engine, one scheduler.
    """

    def __init__(
        self,
        max_num_batched_tokens: int = 2048,
        max_num_seqs: int = 256,
        block_size: int = 16,
        *,
        probe: Probe | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._max_num_batched_tokens = _at_least_one("max_num_batched_tokens", max_num_batched_tokens)
        self._max_num_seqs = _at_least_one("max_num_seqs", max_num_seqs)
        self._block_size = _at_least_one("block_size", block_size)
        self._probe = probe
        self._clock = SystemClock() if clock is None else clock
        self._passes: list[SchedulerPassProtocol] = []
        self._metrics = SchedulerMetrics()

    def add_optimization_pass(self, optimization_pass: SchedulerPassProtocol) -> None:
        """Append a pass to the pipeline. Raises ConfigError for any other object."""
        require_object("optimization_pass", optimization_pass, SchedulerPassProtocol, "scheduler_pass")
        self._passes.append(optimization_pass)
        _logger.info("scheduler pass %d is %s", len(self._passes), optimization_pass.name)

    def apply_pass(self, optimization_pass: SchedulerPassProtocol, ir: ScheduleIR) -> ScheduleIR:
        """Run one pass and verify what it returns.

        Raises EngineError, naming the pass, if it fails, changes the set of pending or of running
        requests, or raises a limit.
        """
        name = optimization_pass.name
        try:
            rewritten = optimization_pass.run(ir)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too
            raise EngineError(f"scheduler pass {name!r} failed: {type(error).__name__}: {error}") from error
        return verify_rewrite(name, ir, rewritten)

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
        started_ns = self._clock.now_ns()
        if available_memory < 0:
            raise InvalidInputError(f"available_memory is {available_memory} blocks; it must not be negative")
        budget, max_num_seqs = self._max_num_batched_tokens, self._max_num_seqs
        order: Sequence[ScheduleRequest] | None = None
        if self._passes:
            ir = self._rewrite(pending_requests, running_requests, available_memory)
            pending_requests, order = ir.pending, ir.running
            available_memory = ir.available_memory
            budget, max_num_seqs = ir.max_num_batched_tokens, ir.max_num_seqs
        step = Step(
            number=self._metrics.num_steps,
            block_size=self._block_size,
            budget=budget,
            available=available_memory,
        )
        step.serve(running_requests, order)
        plan = step.finish(pending_requests, max_num_seqs - len(running_requests), self._probe)
        self._count(plan, budget - step.budget)
        self._metrics.last_schedule_ns = self._clock.now_ns() - started_ns
        return plan

    def metrics(self) -> SchedulerMetrics:
        """Return a copy of the counts so far."""
        return replace(self._metrics)

    def _rewrite(
        self, pending: Sequence[ScheduleRequest], running: Sequence[ScheduleRequest], available_memory: int
    ) -> ScheduleIR:
        ir = ScheduleIR(
            pending=tuple(pending),
            running=tuple(preemption_order(running)),
            available_memory=available_memory,
            max_num_batched_tokens=self._max_num_batched_tokens,
            max_num_seqs=self._max_num_seqs,
            block_size=self._block_size,
        )
        for optimization_pass in self._passes:
            ir = self.apply_pass(optimization_pass, ir)
        return ir

    def _count(self, plan: SchedulePlan, num_tokens: int) -> None:
        metrics = self._metrics
        metrics.num_steps += 1
        metrics.num_scheduled_tokens += num_tokens
        metrics.num_admitted += plan.num_admitted
        metrics.num_preempted += len(plan.preempted_requests)
        metrics.num_idle_steps += not plan.scheduled_requests
        if plan.preempted_requests:
            num_preempted = len(plan.preempted_requests)
            _logger.debug("step %d preempts %d requests for blocks", metrics.num_steps, num_preempted)


def _at_least_one(key: str, value: int) -> int:
    if value < 1:
        raise ConfigError(f"{key} is {value}; it must be at least 1")
    return value
