"""A scheduler pass: whoever came last is admitted first."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sagellm.core import ScheduleIR, SchedulerPassProtocol


@dataclass(frozen=True)
class NewestFirst(SchedulerPassProtocol):
    """Admits the newest request; one that has waited for `patience_s` comes before all others."""

    patience_s: float = 60.0
    name = "newest-first"

    def run(self, ir: ScheduleIR) -> ScheduleIR:
        """Order those who wait. O(waiting · log)."""
        if not ir.can_admit:
            return ir
        arrived = ir.pending.arrived_time
        is_late = ir.now - arrived > self.patience_s
        return ir.order_pending(np.lexsort((-arrived, ~is_late)))
