"""Chunks of prompts by measured time, so that a long prompt does not hold up those who decode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from sagellm.core.plugins.options import Limits
from sagellm.core.protocols.scheduler_ir import (
    ScheduleIR,
    SchedulePlan,
    SchedulerPassProtocol,
)
from sagellm.kvmgr.scheduler_ir.passes.estimates import num_prompt_tokens_within

FIRST_TOKENS = 64
"""Prompt tokens of a step while nothing is known about larger ones."""


@dataclass(slots=True)
class _Chunks:
    largest: int = 0  # prompt tokens that one step has computed


@dataclass(frozen=True)
class ChunkedPrefillPass(SchedulerPassProtocol):
    """Lowers the token budget so that a step takes `step_target_ms`, as the fitted cost predicts it.

    Only when somebody else decodes or waits: a request alone is not cut. Every decode runs, and a prompt
    reads its KV whatever its chunk, so these may take longer by themselves; the chunk's tokens still get
    `min_share` of the target, or less, down to a quarter of that, where a step would take more than 1.3 times
    as long. As a prediction is only as good as what was measured, a step has at most twice the prompt tokens
    of the largest so far. Does nothing unless the engine has a target.
    """

    name = "chunked-prefill"
    min_share: Annotated[float, Limits(ge=0, le=1)] = 0.25

    def start(self) -> _Chunks:
        """Return that nothing was computed yet."""
        return _Chunks()

    def run(self, ir: ScheduleIR) -> ScheduleIR:
        """Lower the budget if a prompt is or may be computed beside others. O(running)."""
        if ir.step_target_ms is None or len(ir.running) + len(ir.pending) < 2:
            return ir
        if not ir.can_admit and not ir.running.num_prefills:
            return ir
        num_decodes = int(np.count_nonzero(ir.running.num_missing == 1))
        num_tokens = max(FIRST_TOKENS, 2 * ir.state.largest)
        if ir.cost is not None:
            within = num_prompt_tokens_within(ir, ir.cost, ir.step_target_ms, self.min_share)
            num_tokens = min(num_tokens, within)
        budget = num_decodes + max(num_tokens, 1)
        return ir.lower(max_num_batched_tokens=min(budget, ir.max_num_batched_tokens))

    def rests(self, state: object) -> bool:
        """Always: it decides about prompts."""
        return True

    def observe(self, plan: SchedulePlan, state: _Chunks) -> None:
        """Remember the largest step."""
        if plan.admitted or plan.running.num_prefills:
            admitted = sum(entry.num_tokens for entry in plan.admitted)
            num_tokens = admitted + int(plan.num_tokens.sum(where=plan.num_tokens > 1))
            state.largest = max(state.largest, num_tokens)
