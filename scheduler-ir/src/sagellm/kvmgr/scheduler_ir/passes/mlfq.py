"""A multi-level feedback queue, as FastServe has for language models (arXiv 2305.05920)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import numpy as np

from sagellm.core.plugins.options import Limits
from sagellm.core.protocols.request_rows import RequestRows
from sagellm.core.protocols.scheduler_ir import ScheduleIR, SchedulerPassProtocol
from sagellm.kvmgr.scheduler_ir.passes.ordering import by, may_lack_blocks, order_pending, order_running

if TYPE_CHECKING:
    import numpy.typing as npt

    Levels = npt.NDArray[np.int64]


@dataclass(frozen=True)
class MLFQPass(SchedulerPassProtocol):
    """Orders admission and preemption by level, the lowest first, then by arrival; no prediction is needed.

    A request falls a level each time it has used up a quantum of tokens, which doubles from level to level:
    `quantum`, twice that, and so on to `num_levels`. With `skips_by_prompt` it starts where its prompt alone
    takes it. It rises a level for each `promote_s` since it arrived. When all seats are taken, up to
    `max_preempted` requests a step give theirs to waiting ones of lower levels.
    """

    name = "mlfq"
    quantum: Annotated[int, Limits(ge=1, le=1 << 30)] = 256
    num_levels: Annotated[int, Limits(ge=1, le=64)] = 8
    promote_s: Annotated[float, Limits(gt=0)] = 10.0
    skips_by_prompt: bool = True
    max_preempted: Annotated[int, Limits(ge=0, le=1 << 20)] = 0

    def run(self, ir: ScheduleIR) -> ScheduleIR:
        """Order both parts, if that can matter. O((waiting + running) · log)."""
        if self.max_preempted and len(ir.pending) and not ir.can_admit and len(ir.running):
            ir = self._make_room(ir)
        if ir.can_admit:
            order = by(ir.pending.arrived_time, ir.admission)
            ir = order_pending(ir, by(self._levels(ir, ir.pending), order))
        if may_lack_blocks(ir):
            order = by(ir.running.arrived_time, ir.preemption)
            ir = order_running(ir, by(self._levels(ir, ir.running), order))
        return ir

    def rests(self, state: object) -> bool:
        """Say whether it preempts nobody for those that wait: else it decides if some can be admitted."""
        return not self.max_preempted

    def _levels(self, ir: ScheduleIR, rows: RequestRows) -> Levels:
        prompts = rows.num_prompt_tokens
        num_generated = rows.num_tokens - prompts
        served = np.where(num_generated > 0, rows.num_tokens, np.minimum(rows.num_computed_tokens, prompts))
        if self.skips_by_prompt:
            served = np.maximum(served, prompts)
        level = np.minimum(np.log2(served / self.quantum + 1).astype(np.int64), self.num_levels - 1)
        age = np.maximum(ir.now - rows.arrived_time, 0)
        promoted: Levels = np.maximum(level - np.minimum(age // self.promote_s, 64).astype(np.int64), 0)
        return promoted

    def _make_room(self, ir: ScheduleIR) -> ScheduleIR:
        """Preempt running requests, the highest level first, as far as waiting ones have lower levels."""
        waiting = np.sort(self._levels(ir, ir.pending))
        levels = self._levels(ir, ir.running)
        victims = by(-levels, ir.preemption[::-1])
        num = min(self.max_preempted, len(waiting), len(victims))
        is_better = waiting[:num] < levels[victims[:num]]
        return ir.preempt(victims[:num][is_better])
