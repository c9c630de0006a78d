"""Serves first what is due first, and keeps decodes within their time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import numpy as np

from sagellm.core.plugins.options import Limits
from sagellm.core.protocols.request_rows import RequestRows
from sagellm.core.protocols.scheduler_ir import ScheduleIR, SchedulerPassProtocol
from sagellm.kvmgr.scheduler_ir.passes.estimates import decode_ns, num_prompt_tokens_within, prefill_ns
from sagellm.kvmgr.scheduler_ir.passes.ordering import (
    by,
    may_lack_blocks,
    order_pending,
    order_running,
    starved_first,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class DeadlinePass(SchedulerPassProtocol):
    """Orders by the latest time at which a request can start and still be in time, the earliest first.

    In time means its first token `ttft_s` after its arrival, and its whole answer by its own deadline, one
    token each `tpot_ms`. What it takes is estimated by the fitted cost of steps, times `factor`, as if
    nothing was cached; while that is unknown, prompts count as nothing. Requests that cannot be in time any
    more go behind those that can, in the order of their arrival, until they have waited `starvation_s`. With
    `tpot_ms`, a step beside decodes has no more prompt tokens than fit that time, but at least `min_tokens`.
    """

    name = "deadline"
    ttft_s: Annotated[float, Limits(gt=0)] | None = None
    tpot_ms: Annotated[float, Limits(gt=0)] | None = None
    factor: Annotated[float, Limits(gt=0)] = 1.0
    starvation_s: Annotated[float, Limits(gt=0)] = 30.0
    min_tokens: Annotated[int, Limits(ge=1, le=1 << 30)] = 16

    def run(self, ir: ScheduleIR) -> ScheduleIR:
        """Order both parts and lower the token budget, if that can matter. O((waiting + running) · log)."""
        before = ir.now - self.starvation_s
        if ir.can_admit and len(ir.pending) > 1:
            due = self._due(ir, ir.pending)
            order = self._ordered(ir, ir.pending, ir.admission, due)
            if np.isfinite(due).any():
                ir = order_pending(ir, starved_first(ir.pending, order, before))
        if may_lack_blocks(ir):
            due = self._due(ir, ir.running)
            order = self._ordered(ir, ir.running, ir.preemption, due)
            if np.isfinite(due).any():
                ir = order_running(ir, starved_first(ir.running, order, before))
        return ir if self.tpot_ms is None else self._keep_decoding(ir, self.tpot_ms)

    def rests(self, state: object) -> bool:
        """Always: it decides about requests that can be admitted or lack blocks, and prompts."""
        return True

    def _due(self, ir: ScheduleIR, rows: RequestRows) -> Floats:
        """Return when each has to go on at the latest: seconds on the engine's clock, or infinite."""
        uncomputed = np.maximum(rows.num_tokens - rows.num_computed_tokens, 0)
        prompt_s = np.zeros(len(rows))
        if ir.cost is not None:
            prompt_s = self.factor * prefill_ns(ir.cost, rows.num_computed_tokens, uncomputed) / 1e9
        token_s: float | Floats = 0.0
        if self.tpot_ms is not None:
            token_s = self.tpot_ms / 1e3
        elif ir.cost is not None:
            token_s = self.factor * decode_ns(ir.cost, rows.num_tokens, len(ir.running) + 1) / 1e9
        due = rows.deadline - prompt_s - np.nan_to_num(rows.predicted_remaining_tokens) * token_s
        if self.ttft_s is not None:
            first = rows.arrived_time + self.ttft_s - prompt_s
            has_output = rows.num_tokens > rows.num_prompt_tokens
            due = np.minimum(due, np.where(has_output, ir.now, first))  # its user is reading already
        return due

    def _ordered(
        self, ir: ScheduleIR, rows: RequestRows, order: npt.NDArray[np.intp], due: Floats
    ) -> npt.NDArray[np.intp]:
        is_late = due < ir.now
        order = by(np.where(is_late, rows.arrived_time, due), order)
        return by(is_late, order)

    def _keep_decoding(self, ir: ScheduleIR, tpot_ms: float) -> ScheduleIR:
        """Lower the token budget so that a step with decodes takes `tpot_ms`."""
        missing = ir.running.num_missing
        num_decodes = int(np.count_nonzero(missing == 1))
        if ir.cost is None or not num_decodes or not (ir.can_admit or (missing > 1).any()):
            return ir
        num_tokens = max(num_prompt_tokens_within(ir, ir.cost, tpot_ms), self.min_tokens)
        return ir.lower(max_num_batched_tokens=min(num_decodes + num_tokens, ir.max_num_batched_tokens))
