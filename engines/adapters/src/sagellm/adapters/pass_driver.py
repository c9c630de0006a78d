"""Runs our passes on another engine's requests, step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from sagellm.adapters.pass_settings import PassSettings
from sagellm.adapters.request_table import ForeignRequest
from sagellm.adapters.step_decisions import StepDecisions, decisions_of
from sagellm.core import (
    PassError,
    PassMetrics,
    PluginRegistry,
    RequestRows,
    ScheduleIR,
    SchedulePlan,
    SchedulerPassProtocol,
    get_logger,
)
from sagellm.core.protocols.request_rows import Probe
from sagellm.core.protocols.scheduler_ir import Admission
from sagellm.core.unchecked import unchecked
from sagellm.kvmgr.scheduler_ir.hits import PrefixHits
from sagellm.kvmgr.scheduler_ir.pipeline import PassPipeline
from sagellm.kvmgr.scheduler_ir.schedule_watchers import PASS_WATCHERS

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int32]

_logger = get_logger(__name__)


class PassDriver:
    """Asks the passes what to do in a step, and tells them what the engine did.

    `now` returns the time on the clock of arrivals, in seconds. `probe` asks the engine's prefix cache;
    `cache_changed` says that its answers may be others now. A pass that fails is removed, and the engine goes
    on as if nothing had been decided in that step.
    """

    def __init__(
        self,
        settings: PassSettings,
        *,
        registry: PluginRegistry,
        block_size: int,
        now: Callable[[], float],
        probe: Probe | None = None,
    ) -> None:
        """Build the passes. Raises ConfigError, UnknownProviderError or PluginError, as an engine's start."""
        self._now = now
        self._passes = [registry.make("scheduler_pass", spec) for spec in settings.passes]
        self._pipeline = PassPipeline(passes=self._passes)
        if settings.print != "none":
            self._pipeline.watch(PASS_WATCHERS[settings.print]())
        self._epoch = self._step = 0
        self._observes = _observe(self._passes)
        self._hits = PrefixHits(probe, lambda: self._epoch, block_size)
        nothing = RequestRows.of(())
        self._template = ScheduleIR(
            pending=nothing,
            running=nothing,
            available_memory=0,
            max_num_batched_tokens=1,
            max_num_seqs=1,
            block_size=block_size,
            cost=settings.step_cost,
            step_target_ms=settings.step_target_ms,
            probe=self._hits,
        )
        self._ir = self._template  # of the last step that passes saw
        self.failures: dict[str, str] = {}
        """Passes that failed and were removed, by name, and why."""

    @property
    def step(self) -> int:
        """The number of the last step that passes saw."""
        return self._step

    @property
    def has_passes(self) -> bool:
        """Whether there is a pass that has not failed."""
        return bool(self._passes)

    @property
    def is_resting(self) -> bool:
        """Whether calm steps need neither `decide` nor `observe`."""
        return self._pipeline.is_resting

    def metrics(self) -> list[PassMetrics]:
        """Return what each pass has cost and decided."""
        return self._pipeline.metrics()

    def cache_changed(self) -> None:
        """Ask the prefix cache again for those that wait."""
        self._epoch += 1

    def decide(
        self,
        pending: RequestRows,
        running: RequestRows,
        *,
        available_memory: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
    ) -> StepDecisions | None:
        """Return what the passes decide; None if that is nothing. Memory is blocks, free or evictable."""
        self._step += 1
        before = self._ir = self._template.updated(
            pending=pending,
            running=running,
            available_memory=available_memory,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            step=self._step,
            now=self._now(),
            epoch=self._epoch,
        )
        try:
            after = self._ir = self._pipeline.run(before)
        except PassError as error:
            self._remove(error)
            return None
        if self._observes:  # they may look at it once the engine has changed it
            _ = running.num_tokens, running.num_computed_tokens
        return decisions_of(before, after)

    def observe(
        self,
        num_scheduled: Mapping[str, int],
        requests: Sequence[ForeignRequest],
        *,
        admitted: Sequence[Admission],
        preempted: Sequence[int],
    ) -> None:
        """Tell the passes what the engine computes in this step: tokens by request.

        `requests` are those of the running rows, `admitted` has positions of the waiting rows, `preempted` of
        the running ones.
        """
        if not self._observes and not self._ir.is_calm:
            return
        ir = self._ir
        plan = unchecked(
            _ObservedPlan,
            pending=ir.pending,
            running=ir.running,
            step=ir.step,
            admitted=admitted,
            preempted=preempted,
            preempted_for=(-1,) * len(preempted),
            num_deferred=len(ir.pending) - len(admitted),
            decisions=ir.decisions,
            requests=requests,
            num_scheduled=num_scheduled,
            block_size=ir.block_size,
        )
        try:
            self._pipeline.observe(plan)
        except PassError as error:
            self._remove(error)

    def _remove(self, error: PassError) -> None:
        """Take a pass that failed out of the pipeline."""
        failed = error.optimization_pass
        self._passes = [each for each in self._passes if each is not failed]
        self._pipeline = self._pipeline.replaced_by(self._passes)
        self._observes = _observe(self._passes)
        name = failed.name if isinstance(failed, SchedulerPassProtocol) else "?"
        self.failures[name] = str(error)
        _logger.error("%s; it is removed, and the engine goes on without it", error, exc_info=error)


def _observe(passes: Sequence[SchedulerPassProtocol]) -> bool:
    return any(type(each).observe is not SchedulerPassProtocol.observe for each in passes)


class _ObservedPlan(SchedulePlan):
    """What an engine does in a step, as a plan. Few passes look at each running request."""

    requests: Sequence[ForeignRequest]
    num_scheduled: Mapping[str, int]
    block_size: int

    @cached_property
    def rows(self) -> Ints:
        """Running rows that compute something: (served,)."""
        scheduled = self.num_scheduled
        served = (i for i, request in enumerate(self.requests) if request.request_id in scheduled)
        return np.fromiter(served, np.int32)

    @cached_property
    def num_tokens(self) -> Ints:
        """Tokens that each of them computes: (served,)."""
        scheduled, requests = self.num_scheduled, self.requests
        return np.array([scheduled[requests[row].request_id] for row in self.rows.tolist()], np.int32)

    @cached_property
    def num_new_blocks(self) -> Ints:
        """Blocks that they need for that: (served,)."""
        computed = self.running.num_computed_tokens[self.rows]
        needed = -(-(computed + self.num_tokens) // self.block_size)
        num: Ints = np.maximum(needed - self.running.num_blocks[self.rows], 0).astype(np.int32)
        return num
