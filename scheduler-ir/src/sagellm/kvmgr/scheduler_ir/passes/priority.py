"""Admits by priority, to which waiting adds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sagellm.core.protocols.scheduler_ir import RequestRows, ScheduleIR, SchedulerPassProtocol
from sagellm.kvmgr.scheduler_ir.passes.options import require_positive
from sagellm.kvmgr.scheduler_ir.passes.ordering import by, may_lack_blocks, order_pending, order_running

if TYPE_CHECKING:
    import numpy.typing as npt


@dataclass(frozen=True)
class PriorityBasedPass(SchedulerPassProtocol):
    """Orders admission and preemption by priority; `ageing_s` of waiting count as one level more.

    Requests of one level keep the order so far, that of an earlier pass for instance.
    """

    ageing_s: float = 30.0

    def __post_init__(self) -> None:
        require_positive(self, "ageing_s")

    @property
    def name(self) -> str:
        """`priority`."""
        return "priority"

    def run(self, ir: ScheduleIR) -> ScheduleIR:
        """Order both parts, if that can matter. O((waiting + running) · log)."""
        if ir.can_admit:
            ir = order_pending(ir, by(-self._levels(ir, ir.pending), ir.admission))
        if may_lack_blocks(ir):
            ir = order_running(ir, by(-self._levels(ir, ir.running), ir.preemption))
        return ir

    def _levels(self, ir: ScheduleIR, rows: RequestRows) -> npt.NDArray[np.float64]:
        levels: npt.NDArray[np.float64] = rows.priority.astype(np.float64) + np.floor(
            (ir.now - rows.arrived_time) / self.ageing_s
        )
        return levels
