"""Preempts, for lack of blocks, what costs least to do again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np

from sagellm.core.plugins.options import Limits
from sagellm.core.protocols.request_rows import RequestRows
from sagellm.core.protocols.scheduler_ir import (
    ScheduleIR,
    SchedulePlan,
    SchedulerPassProtocol,
)
from sagellm.kvmgr.scheduler_ir.passes.estimates import prefill_ns
from sagellm.kvmgr.scheduler_ir.passes.ordering import by, may_lack_blocks, order_running, trusted_priority

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

_MAX_KEPT = 4096
"""Requests whose preemptions are counted; more are forgotten all at once, and with them their protection."""

_MOST = 16
"""Doublings by preemptions or by priority, at most."""


@dataclass(frozen=True)
class MemoryAwarePreemptionPass(SchedulerPassProtocol):
    """Orders preemption by the work that would be lost: computed tokens, by the cost of steps if it is known.

    Each earlier preemption, each level of priority and each `ageing_s` since arrival double what a request's
    work counts, so no request is the victim forever. If an earlier pass has ordered preemption, the order
    that it gave to tenants stands.

    `mode` says what becomes of a victim's KV: `recompute` leaves it to the prefix cache, `swap` has the
    engine copy it to the tiers (`kv.tiers`) at once, and `auto` swaps where computing it again takes
    `min_swap_ms`.
    """

    name = "memory-aware"
    mode: Literal["auto", "recompute", "swap"] = "auto"
    ageing_s: Annotated[float, Limits(gt=0)] = 30.0
    min_swap_ms: Annotated[float, Limits(gt=0)] = 50.0

    def start(self) -> dict[int, int]:
        """Return the number of preemptions by key, empty at first."""
        return {}

    def run(self, ir: ScheduleIR) -> ScheduleIR:
        """Order the running requests if blocks may be short, and mark those to swap. O(running · log)."""
        if not may_lack_blocks(ir) and not ir.preempted:
            return ir
        running = ir.running
        computed = running.num_computed_tokens
        lost: Floats = np.maximum(computed, 1).astype(np.float64)
        if ir.cost is not None:
            lost = prefill_ns(ir.cost, np.zeros_like(computed), computed)
        if may_lack_blocks(ir):
            order = by(-self._worth(ir, lost), ir.preemption)
            if any((each.kind, each.target) == ("order", "running") for each in ir.decisions):
                order = by(_places_of_groups(running, ir.preemption), order)
            ir = order_running(ir, order)
        if self.mode == "swap":
            return ir.swap(np.arange(len(running)))
        if self.mode == "auto" and ir.cost is not None:
            return ir.swap(lost >= 1e6 * self.min_swap_ms)
        return ir

    def rests(self, state: object) -> bool:
        """Always: it decides about requests that lack blocks."""
        return True

    def observe(self, plan: SchedulePlan, state: dict[int, int]) -> None:
        """Count preemptions."""
        if not len(plan.preempted):
            return
        if len(state) >= _MAX_KEPT:
            state.clear()
        for key in plan.running.key[list(plan.preempted)].tolist():
            state[key] = state.get(key, 0) + 1

    def _worth(self, ir: ScheduleIR, lost: Floats) -> Floats:
        """Return the binary logarithm of what each request's work counts."""
        running, counts = ir.running, ir.state
        worth = np.log2(np.maximum(lost, 1)) + np.clip(running.priority, -_MOST, _MOST)
        worth += (ir.now - running.arrived_time) / self.ageing_s
        if counts:
            worth += np.minimum([counts.get(key, 0) for key in running.key.tolist()], _MOST)
        return worth


def _places_of_groups(rows: RequestRows, order: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """Return for each row the last place of its group in an order, so that groups keep their order.

    A group is a tenant's requests of one priority that holds across tenants.
    """
    pairs = np.stack((rows.tenant, trusted_priority(rows)))
    found, inverse = np.unique(pairs, axis=1, return_inverse=True)
    groups: npt.NDArray[np.intp] = inverse.ravel()
    last = np.zeros(found.shape[1], np.intp)
    last[groups[order]] = np.arange(len(order))  # of several the last assignment holds
    return last[groups]
