"""Admits by priority, to which waiting adds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import numpy as np

from sagellm.core.plugins.options import Limits
from sagellm.core.protocols.request_rows import RequestRows
from sagellm.core.protocols.scheduler_ir import ScheduleIR, SchedulerPassProtocol
from sagellm.kvmgr.scheduler_ir.passes.ordering import (
    by,
    make_way,
    may_lack_blocks,
    order_pending,
    order_running,
)

if TYPE_CHECKING:
    import numpy.typing as npt


@dataclass(frozen=True)
class PriorityBasedPass(SchedulerPassProtocol):
    """Orders admission and preemption by priority; `ageing_s` of waiting count as one level more.

    Requests of one level keep the order so far, that of an earlier pass for instance. While the first waiting
    request could start, the prompts of running ones of lower levels advance by one token a step: a running
    prompt takes the whole token budget otherwise, for seconds if it is long.
    """

    name = "priority"
    ageing_s: Annotated[float, Limits(gt=0)] = 30.0

    def run(self, ir: ScheduleIR) -> ScheduleIR:
        """Order both parts, if that can matter. O((waiting + running) · log)."""
        if ir.can_admit:
            levels = self._levels(ir, ir.pending)
            ir = order_pending(ir, by(-levels, ir.admission))
            ir = make_way(ir, levels, self._levels(ir, ir.running))
        if may_lack_blocks(ir):
            ir = order_running(ir, by(-self._levels(ir, ir.running), ir.preemption))
        return ir

    def rests(self, state: object) -> bool:
        """Always: it decides about requests that can be admitted, or lack blocks."""
        return True

    def _levels(self, ir: ScheduleIR, rows: RequestRows) -> npt.NDArray[np.float64]:
        levels: npt.NDArray[np.float64] = rows.priority.astype(np.float64) + np.floor(
            (ir.now - rows.arrived_time) / self.ageing_s
        )
        return levels
