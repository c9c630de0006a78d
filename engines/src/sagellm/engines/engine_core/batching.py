"""Batching efficiency: how full steps were when more could have run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from sagellm.core import RequestRows, SchedulePlan
from sagellm.engines.metrics.fairness import BatchStep, batching_efficiency


@dataclass(kw_only=True)
class BatchingMetrics:
    """Batching efficiency = useful tokens ÷ min(token budget, tokens that blocks and seats would admit).

    The mean over the steps in which a waiting request could have been admitted. The token budget is the
    configured one; `lowered_batching_efficiency` is the same with the budget to which passes lowered it, such
    as what a step can compute within its target time.
    """

    num_steps: int = 0  # of this kind
    sum_of_shares: float = 0.0
    sum_of_lowered_shares: float = 0.0

    def __sub__(self, earlier: BatchingMetrics) -> BatchingMetrics:
        """Return the difference from an earlier reading."""
        return BatchingMetrics(
            num_steps=self.num_steps - earlier.num_steps,
            sum_of_shares=self.sum_of_shares - earlier.sum_of_shares,
            sum_of_lowered_shares=self.sum_of_lowered_shares - earlier.sum_of_lowered_shares,
        )

    @property
    def batching_efficiency(self) -> float | None:
        """The mean; None before the first such step."""
        return self.sum_of_shares / self.num_steps if self.num_steps else None

    @property
    def lowered_batching_efficiency(self) -> float | None:
        """The mean with budgets as passes lowered them; None before the first such step."""
        return self.sum_of_lowered_shares / self.num_steps if self.num_steps else None


class BatchingMeter:
    """Compares what each plan computes with what the budget, `max_num_seqs` and the free blocks allow.

    O(requests that would be admitted) in steps with a waiting request that fits, O(1) in all others.
    """

    def __init__(self, *, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        self._budget = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._metrics = BatchingMetrics()

    def measure(
        self,
        plan: SchedulePlan,
        *,
        waiting: RequestRows,
        running: RequestRows,
        available_blocks: int,
        num_blocks_for: Callable[[int], int],
    ) -> None:
        """Count a new plan, before it is carried out."""
        num_seats = self._max_num_seqs - len(running)
        if not num_seats:
            return
        available_blocks -= int(plan.num_new_blocks.sum())
        num_waiting_tokens = 0
        admitted = {entry.row: entry for entry in plan.admitted}
        num_tokens = waiting.num_tokens
        for row in range(min(num_seats, len(waiting))):
            if available_blocks <= 0 or num_waiting_tokens >= self._budget:
                break
            wanted = num_tokens.item(row)
            known = admitted.get(row)
            available_blocks -= num_blocks_for(wanted) if known is None else known.num_new_blocks
            if available_blocks < 0:
                break
            num_waiting_tokens += wanted - (0 if known is None else known.hit)
        if not num_waiting_tokens:
            return
        step = BatchStep(
            num_useful_tokens=plan.num_scheduled_tokens,
            token_budget=self._budget,
            num_admissible_tokens=int(running.num_missing.sum()) + num_waiting_tokens,
        )
        self._metrics.num_steps += 1
        share = lowered_share = batching_efficiency([step])
        if (lowered := _lowered(plan, self._budget)) != self._budget:
            lowered_share = batching_efficiency([replace(step, token_budget=lowered)])
        self._metrics.sum_of_shares += share
        self._metrics.sum_of_lowered_shares += lowered_share

    def metrics(self) -> BatchingMetrics:
        """Return a copy of the counts so far."""
        return replace(self._metrics)


def _lowered(plan: SchedulePlan, budget: int) -> int:
    """Return the token budget that passes left."""
    return min(
        (
            int(one.value or 0)
            for one in plan.decisions
            if (one.kind, one.target) == ("lower", "max_num_batched_tokens")
        ),
        default=budget,
    )
