"""Passes in their order, each verified, timed and shown to whoever watches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TextIO

from sagellm.core.checks import require_object
from sagellm.core.errors import EngineError
from sagellm.core.logging import get_logger
from sagellm.core.protocols.scheduler_ir import (
    PassMetrics,
    ScheduleIR,
    SchedulePlan,
    SchedulerPassProtocol,
)
from sagellm.core.runtime import Clock, SystemClock
from sagellm.core.schedule_verifier import verify_rewrite

_logger = get_logger(__name__)

Watcher = Callable[[str, ScheduleIR, ScheduleIR], None]
"""Called after each pass with its name and the schedule before and after it."""


class PassPipeline:
    """Runs passes one after another on a schedule. Each has a state of its own, kept across steps."""

    def __init__(self, clock: Clock | None = None, passes: Sequence[SchedulerPassProtocol] = ()) -> None:
        self._now_ns = (clock or SystemClock()).now_ns
        self._entries: list[tuple[SchedulerPassProtocol, Any, PassMetrics]] = []
        self._observers: list[tuple[SchedulerPassProtocol, Any]] = []
        self._watchers: list[Watcher] = []
        for each in passes:
            self.add(each)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, optimization_pass: SchedulerPassProtocol) -> None:
        """Append a pass, with a new state. Raises ConfigError for any other object."""
        require_object("optimization_pass", optimization_pass, SchedulerPassProtocol, "scheduler_pass")
        state = optimization_pass.start()
        self._entries.append((optimization_pass, state, PassMetrics(name=optimization_pass.name)))
        if type(optimization_pass).observe is not SchedulerPassProtocol.observe:
            self._observers.append((optimization_pass, state))
        _logger.info("scheduler pass %d is %r", len(self._entries), optimization_pass)

    def watch(self, watcher: Watcher) -> None:
        """Show every pass's effect from the next step on."""
        self._watchers.append(watcher)

    def run(self, ir: ScheduleIR) -> ScheduleIR:
        """Return the schedule with the decisions of all passes. Raises EngineError as `apply_pass` does."""
        if not self._entries:
            return ir
        started_ns = self._now_ns()
        for optimization_pass, state, metrics in self._entries:
            before = ir.with_state(state)
            ir = apply_pass(optimization_pass, before)
            ended_ns = self._now_ns()
            metrics.num_runs += 1
            metrics.num_decisions += len(ir.decisions) - len(before.decisions)
            metrics.total_ns += ended_ns - started_ns
            started_ns = ended_ns
            for watcher in self._watchers:
                watcher(metrics.name, before, ir)
        return ir

    def observe(self, plan: SchedulePlan) -> None:
        """Tell the passes what will be computed. Raises EngineError, naming the pass that failed."""
        for optimization_pass, state in self._observers:
            try:
                optimization_pass.observe(plan, state)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                raise _failure(optimization_pass, error) from error

    def metrics(self) -> list[PassMetrics]:
        """Return a copy of the counts of each pass, in their order."""
        return [replace(metrics) for _, _, metrics in self._entries]


def apply_pass(optimization_pass: SchedulerPassProtocol, ir: ScheduleIR) -> ScheduleIR:
    """Run one pass and verify what it decided, with a new state if `ir.state` is None.

    Raises EngineError, naming the pass and the rule that it broke, or its exception.
    """
    try:
        if ir.state is None and (state := optimization_pass.start()) is not None:
            ir = ir.with_state(state)
        rewritten = optimization_pass.run(ir)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too
        raise _failure(optimization_pass, error) from error
    return verify_rewrite(optimization_pass.name, ir, rewritten)


def _failure(optimization_pass: SchedulerPassProtocol, error: BaseException) -> EngineError:
    return EngineError(f"scheduler pass {optimization_pass.name!r} failed: {type(error).__name__}: {error}")


def emit_ir(stream: TextIO | None = None) -> Watcher:
    """Return a watcher that prints the schedule after each pass; to standard error by default."""

    def print_schedule(name: str, before: ScheduleIR, after: ScheduleIR) -> None:
        del before
        print(f"// after {name}\n{after.to_text()}", file=stream or sys.stderr)

    return print_schedule


def print_changed(stream: TextIO | None = None) -> Watcher:
    """Return a watcher that prints the decisions of each pass that decided something."""

    def print_decisions(name: str, before: ScheduleIR, after: ScheduleIR) -> None:
        for decision in after.decisions[len(before.decisions) :]:
            print(f"step {after.step}: {decision}", file=stream or sys.stderr)

    return print_decisions
