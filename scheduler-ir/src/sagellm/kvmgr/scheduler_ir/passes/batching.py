"""Admits the set of requests that fills a step best."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import numpy as np

from sagellm.core.plugins.options import Limits
from sagellm.core.protocols.scheduler_ir import ScheduleIR, SchedulerPassProtocol
from sagellm.kvmgr.scheduler_ir.passes.ordering import order_pending, starved_first

if TYPE_CHECKING:
    import numpy.typing as npt

    Places = npt.NDArray[np.intp]


@dataclass(frozen=True)
class BatchingEfficiencyPass(SchedulerPassProtocol):
    """Fills the tokens and the blocks of a step: the oldest request first, then whole prompts by best fit.

    After the oldest one, the longest prompt that fits into what is left is taken, again and again, so prompts
    of similar lengths come together, few are cut, and a prompt for which there are no blocks holds up no
    other until it has waited `starvation_s`. Lengths count as if nothing were cached.
    """

    name = "batching"
    starvation_s: Annotated[float, Limits(gt=0)] = 10.0

    def run(self, ir: ScheduleIR) -> ScheduleIR:
        """Order admission. O(waiting · log), and a few microseconds for each free seat."""
        if not ir.can_admit or len(ir.pending) < 2:
            return ir
        running, lengths = ir.running, ir.pending.num_tokens
        missing = running.num_missing
        num_tokens = max(ir.max_num_batched_tokens - int(missing.sum(dtype=np.int64)), 1)
        num_blocks = ir.available_memory
        if ir.preempted:
            num_blocks += int(running.num_blocks[list(ir.preempted)].sum())
        oldest = int(ir.pending.arrived_time.argmin())
        chosen: list[int] = []
        if -(-int(lengths[oldest]) // ir.block_size) <= num_blocks:
            chosen.append(oldest)
            num_tokens -= int(lengths[oldest])
            num_blocks -= -(-int(lengths[oldest]) // ir.block_size)
        chosen += self._packed(ir, oldest, num_tokens, num_blocks)
        is_chosen = np.zeros(len(lengths), np.bool_)
        is_chosen[chosen] = True
        rest = ir.admission[~is_chosen[ir.admission]]
        lacks_blocks = lengths[rest] > num_blocks * ir.block_size
        order = np.concatenate((np.array(chosen, np.intp), rest[~lacks_blocks], rest[lacks_blocks]))
        return order_pending(ir, starved_first(ir.pending, order, ir.now - self.starvation_s))

    def rests(self, state: object) -> bool:
        """Always: it decides about requests that can be admitted."""
        return True

    def _packed(self, ir: ScheduleIR, oldest: int, num_tokens: int, num_blocks: int) -> list[int]:
        """Return the rows that fill the tokens and blocks after the oldest one, the longest fitting first."""
        order: Places = np.argsort(-ir.pending.num_tokens[ir.admission], kind="stable")
        rows = ir.admission[order][::-1]  # ascending; of equal ones the first comes last
        lengths: list[int] = ir.pending.num_tokens[rows].tolist()
        chosen: list[int] = []
        place = len(rows)
        while len(chosen) < ir.num_free_seats - 1:
            place = bisect_right(lengths, min(num_tokens, num_blocks * ir.block_size), 0, place) - 1
            if place < 0:
                break
            row = int(rows[place])
            if row != oldest:
                chosen.append(row)
                num_tokens -= lengths[place]
                num_blocks -= -(-lengths[place] // ir.block_size)
        return chosen
