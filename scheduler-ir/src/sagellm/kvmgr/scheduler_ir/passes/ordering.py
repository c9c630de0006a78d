"""What passes that order rows have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sagellm.core.protocols.request_rows import RequestRows
from sagellm.core.protocols.scheduler_ir import ScheduleIR

if TYPE_CHECKING:
    import numpy.typing as npt

    Places = npt.NDArray[np.intp]


def by(keys: npt.NDArray[np.generic], order: Places) -> Places:
    """Sort an order by ascending keys of its rows; equal ones stay as they were."""
    return order[np.argsort(keys[order], kind="stable")]


def starved_first(rows: RequestRows, order: Places, before: float) -> Places:
    """Move requests that arrived before a time to the front, the oldest first."""
    arrived = rows.arrived_time[order]
    is_starved = arrived < before
    if not is_starved.any():
        return order
    starved = order[is_starved][np.argsort(arrived[is_starved], kind="stable")]
    return np.concatenate((starved, order[~is_starved]))


def order_pending(ir: ScheduleIR, order: Places) -> ScheduleIR:
    """Decide on an order of admission, unless it is the order so far."""
    return ir if np.array_equal(order, ir.admission) else ir.order_pending(order)


def order_running(ir: ScheduleIR, order: Places) -> ScheduleIR:
    """Decide on an order of preemption, unless it is the order so far."""
    return ir if np.array_equal(order, ir.preemption) else ir.order_running(order)


def make_way(
    ir: ScheduleIR, waiting: npt.NDArray[np.float64], running: npt.NDArray[np.float64]
) -> ScheduleIR:
    """Let prompts that run below the level of the first waiting request yield to it, if that has its blocks.

    A running prompt takes the whole token budget otherwise, for seconds if it is long. Levels are (rows,).
    Prompts of other tenants make way for positive priorities of trusted tenants only.
    """
    rows = ir.running
    is_prompt = rows.num_missing > 1
    head = next((row for row in ir.admission.tolist() if row not in ir.deferred), None)
    if head is None or not is_prompt.any():
        return ir
    is_below = is_prompt & (running < waiting[head])
    if not trusted_priority(ir.pending)[head]:
        is_below &= rows.tenant == ir.pending.tenant[head]
    if not is_below.any() or ir.hits([head])[0].num_blocks_needed > ir.available_memory:
        return ir
    return ir.yield_to_pending(1, is_below)


def trusted_priority(rows: RequestRows) -> npt.NDArray[np.int32]:
    """Return the priorities that hold across tenants: positive ones of trusted tenants, else 0."""
    priority: npt.NDArray[np.int32] = np.where(rows.is_trusted, np.maximum(rows.priority, 0), 0)
    return priority


def may_lack_blocks(ir: ScheduleIR) -> bool:
    """Say whether running requests could need more blocks in this step than there are.

    A decode needs at most one, and prompts together what their tokens fill, as far as the budget goes.
    """
    needed = len(ir.running)
    if ir.running.num_prefills:
        needed += -(-ir.max_num_batched_tokens // ir.block_size)
    return ir.available_memory < needed
