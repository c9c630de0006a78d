"""Runs passes in their order; verifies, times and shows each one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

from sagellm.core.checks import require_object
from sagellm.core.errors import PassError
from sagellm.core.logging import get_logger
from sagellm.core.plugins.failure import contained
from sagellm.core.protocols.request_rows import RequestRows
from sagellm.core.protocols.scheduler_ir import (
    PassMetrics,
    PassWatcher,
    ScheduleIR,
    SchedulePlan,
    SchedulerPassProtocol,
)
from sagellm.core.runtime import Clock, SystemClock
from sagellm.kvmgr.scheduler_ir.schedule_verifier import BrokenRuleError, verify_rewrite

_logger = get_logger(__name__)

_Entry = tuple[SchedulerPassProtocol, Any, PassMetrics]


class PassPipeline:
    """Runs passes one after another on a schedule. Each has a state of its own, kept across steps.

    In calm steps all passes are left out as soon as each of them says that it rests, as long as the same
    requests wait: the same object stands for them in that case.
    """

    def __init__(self, clock: Clock | None = None, passes: Sequence[SchedulerPassProtocol] = ()) -> None:
        self._clock = clock or SystemClock()
        self._now_ns = self._clock.now_ns
        self._entries: list[_Entry] = []
        self._observers: list[tuple[SchedulerPassProtocol, Any]] = []
        self._watchers: list[PassWatcher] = []
        self._was_calm = False  # the step that was run last
        self._pending = RequestRows.of(())  # of that step
        self.is_resting = False
        """Whether calm steps need not be run or observed, as long as the same requests wait."""
        for each in passes:
            self.add(each)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, optimization_pass: SchedulerPassProtocol) -> None:
        """Append a pass, with a new state. Raises ConfigError for another object, PassError if it fails."""
        require_object("optimization_pass", optimization_pass, SchedulerPassProtocol, "scheduler_pass")
        with contained() as failure:
            state = optimization_pass.start()
        if failure.error is not None:
            _raise_failure(optimization_pass, failure.error)
        self._append((optimization_pass, state, PassMetrics(name=optimization_pass.name)))

    def replaced_by(self, passes: Sequence[SchedulerPassProtocol]) -> PassPipeline:
        """Return a pipeline of other passes with the same watchers.

        A pass equal to one of this pipeline keeps its state and counts. Raises ConfigError for any other
        object, PassError for a pass whose `start` fails.
        """
        pipeline = PassPipeline(self._clock)
        pipeline._watchers = self._watchers
        entries = list(self._entries)
        for each in passes:
            alike = (
                place
                for place, (known, _, _) in enumerate(entries)
                if type(known) is type(each) and known == each
            )
            place = next(alike, None)
            if place is None:
                pipeline.add(each)
            else:
                pipeline._append(entries.pop(place))
        num_kept = len(self._entries) - len(entries)
        _logger.info(
            "scheduler passes change: %d stay and keep their state, %d are new, %d are gone",
            num_kept,
            len(pipeline) - num_kept,
            len(entries),
        )
        return pipeline

    def _append(self, entry: _Entry) -> None:
        optimization_pass, state, _ = entry
        self._entries.append(entry)
        self.is_resting = False
        if type(optimization_pass).observe is not SchedulerPassProtocol.observe:
            self._observers.append((optimization_pass, state))
        _logger.info("scheduler pass %d is %r", len(self._entries), optimization_pass)

    def watch(self, watcher: PassWatcher) -> None:
        """Show every pass's effect from the next step on."""
        self._watchers.append(watcher)
        self.is_resting = False

    def run(self, ir: ScheduleIR) -> ScheduleIR:
        """Return the schedule with the decisions of all passes. Raises PassError as `apply_pass` does."""
        if not self._entries:
            return ir
        self._was_calm = ir.is_calm
        if self.is_resting and self._was_calm and ir.pending is self._pending:
            return ir
        self.is_resting, self._pending = False, ir.pending
        started_ns = self._now_ns()
        effects = []
        with contained() as failure:  # once for all: it takes as long as a pass that decides nothing
            for optimization_pass, state, metrics in self._entries:
                before = ir.with_state(state)
                ir = verify_rewrite(metrics.name, before, optimization_pass.run(before))
                ended_ns = self._now_ns()
                metrics.num_runs += 1
                if ir is not before:
                    metrics.num_decisions += len(ir.decisions) - len(before.decisions)
                metrics.total_ns += ended_ns - started_ns
                started_ns = ended_ns
                if self._watchers:
                    effects.append((metrics.name, before, ir))
        for watcher in self._watchers:
            for effect in effects:
                watcher(*effect)
        if failure.error is not None:
            _raise_failure(optimization_pass, failure.error)
        return ir

    def observe(self, plan: SchedulePlan) -> None:
        """Tell the passes what will be computed. Raises PassError for one that fails."""
        if self.is_resting:
            return
        with contained() as failure:
            for optimization_pass, state in self._observers:
                optimization_pass.observe(plan, state)
            if self._was_calm and not self._watchers:
                for optimization_pass, state, _ in self._entries:
                    if not optimization_pass.rests(state):
                        break
                else:
                    self.is_resting = True
        if failure.error is not None:
            _raise_failure(optimization_pass, failure.error)

    @property
    def may_repeat(self) -> bool:
        """Whether the calm steps that follow the one that is run need no pass."""
        return self.is_resting or not self._entries

    def metrics(self) -> list[PassMetrics]:
        """Return a copy of the counts of each pass, in their order."""
        return [replace(metrics) for _, _, metrics in self._entries]


def apply_pass(optimization_pass: SchedulerPassProtocol, ir: ScheduleIR) -> ScheduleIR:
    """Run one pass and verify what it decided, with a new state if `ir.state` is None.

    Raises PassError, which has the pass, the rule that it broke or its exception.
    """
    with contained() as failure:
        if ir.state is None and (state := optimization_pass.start()) is not None:
            ir = ir.with_state(state)
        return verify_rewrite(optimization_pass.name, ir, optimization_pass.run(ir))
    assert failure.error is not None, "it has not returned"
    _raise_failure(optimization_pass, failure.error)


def _raise_failure(optimization_pass: SchedulerPassProtocol, error: BaseException) -> NoReturn:
    if isinstance(error, BrokenRuleError):
        raise PassError(str(error), optimization_pass) from None
    text = f"scheduler pass {optimization_pass.name!r} failed: {type(error).__name__}: {error}"
    raise PassError(text, optimization_pass) from error
