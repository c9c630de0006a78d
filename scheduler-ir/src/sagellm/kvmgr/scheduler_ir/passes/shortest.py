"""Serves first what takes the least time, while nobody waits longer than some would in order of arrival."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import numpy as np

from sagellm.core.plugins.options import Limits
from sagellm.core.protocols.scheduler_ir import ScheduleIR, SchedulePlan, SchedulerPassProtocol
from sagellm.kvmgr.scheduler_ir.passes.estimates import (
    decode_ns,
    decodes_ns,
    num_tokens_within,
    prefill_ns,
    remaining_output,
)
from sagellm.kvmgr.scheduler_ir.passes.known_hits import KnownHits
from sagellm.kvmgr.scheduler_ir.passes.ordering import (
    by,
    make_way,
    may_lack_blocks,
    order_pending,
    order_running,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    from sagellm.core.protocols.request_rows import RequestRows
    from sagellm.core.step_cost import StepCost

    Floats = npt.NDArray[np.float64]
    Places = npt.NDArray[np.intp]

_RATE_S = 30.0
"""Time constant of the rate of admission, in seconds in which prompts wait or are computed."""

_FIRST_S = 5.0
"""Such seconds for which the rate counts as 1 before it was measured."""

_LONGEST_S = 60.0
"""Time constant with which the longest wait is forgotten."""


@dataclass(slots=True)
class _Queue:
    """How long the queue is: the work of the waiting requests ÷ the rate at which work is admitted.

    A request that arrives now would wait so long in order of arrival. It hardly depends on the order in which
    the work is done, so it can be measured while that is another one.
    """

    hits: KnownHits = field(default_factory=KnownHits)
    now: float = 0.0
    work_s: Floats | None = None  # of the waiting rows of this step: what they take alone
    is_busy: bool = False  # since the last step prompts wait or are computed
    admitted_s: float = _FIRST_S  # work, in the last busy seconds, which are …
    busy_s: float = _FIRST_S
    peak_s: float = 0.0  # the longest wait in order of arrival, of late …
    peaked: float = 0.0  # … and when that was

    def advance(self, now: float) -> None:
        """Begin a step."""
        passed_s = max(now - self.now, 0.0)
        self.now, self.work_s = now, None
        if self.is_busy:
            decay = math.exp(-passed_s / _RATE_S)
            self.admitted_s *= decay
            self.busy_s = self.busy_s * decay + _RATE_S * (1 - decay)  # ∫ of what is left of each moment

    @property
    def longest_s(self) -> float:
        """The longest wait in order of arrival, which is forgotten with time."""
        return self.peak_s * math.exp((self.peaked - self.now) / _LONGEST_S)

    @property
    def slowdown(self) -> float:
        """How long a part of the queue takes, in times of what it takes alone; no faster than that."""
        return max(self.busy_s / max(self.admitted_s, 1e-9), 1.0)

    def waits_s(self, work_s: Floats) -> Floats:
        """Return how long the queue takes for each part of its work: (rows,)."""
        self.work_s = work_s
        waits_s = work_s * self.slowdown
        if (wait_s := float(waits_s.sum())) >= self.longest_s:
            self.peak_s, self.peaked = wait_s, self.now
        return waits_s


@dataclass(frozen=True)
class ShortestFirstPass(SchedulerPassProtocol):
    """Admits first what takes the least time; where outputs are predicted, preempts last what does.

    That is the time of its uncached prompt and of its predicted output, by the fitted cost of steps; in
    tokens while that is unknown. Predictions count from `min_confidence` on. Other requests count with the
    mean of those that do, and if there are none, all count with their prompts alone. A step looks up at most
    `max_probes` requests in the prefix cache.

    A request overtakes older ones only while each of them can still start within `patience` × the longest
    time that requests of the last minute would have waited in order of arrival. With about 1, nobody waits
    longer than some would in that order; more gains more for short requests, and costs long ones more.
    A prompt that runs gets what shorter ones leave of a step, until it is that old.

    Priorities go before this order, and prompts that run make way for a waiting request of a higher one. But
    of the requests that have waited `starvation_s`, the oldest goes before all others.
    """

    name = "shortest"
    min_confidence: Annotated[float, Limits(ge=0, le=1)] = 0.5
    patience: Annotated[float, Limits(gt=0)] = 0.9
    starvation_s: Annotated[float, Limits(gt=0)] = 300.0
    max_probes: Annotated[int, Limits(ge=1, le=1 << 20)] = 32

    def start(self) -> _Queue:
        """Return an empty queue."""
        return _Queue()

    def run(self, ir: ScheduleIR) -> ScheduleIR:
        """Order both parts, if that can matter. O((waiting + running) · log)."""
        queue: _Queue = ir.state
        queue.advance(ir.now)
        if ir.can_admit and len(ir.pending):
            cached = queue.hits.update(
                ir, self.max_probes, lambda rows: [hit.num_tokens for hit in ir.hits(rows)]
            )
            remaining = self._remaining(ir, ir.pending, cached)
            begun_ns = np.zeros(0) if ir.cost is None else _begun_ns(ir, ir.cost)
            order = self._admission(ir, cached, remaining, begun_ns)
            ir = order_pending(ir, self._by_priority(ir, ir.pending, order))
            if ir.running.num_prefills:
                ir = make_way(ir, self._levels(ir, ir.pending), self._levels(ir, ir.running))
                ir = self._leave_to_shorter(ir, cached, remaining, begun_ns)
        if may_lack_blocks(ir) and remaining_output(ir.running, self.min_confidence).any():
            remaining = self._remaining(ir, ir.running, ir.running.num_computed_tokens)
            ir = order_running(ir, self._by_priority(ir, ir.running, by(remaining, ir.preemption)))
        return ir

    def rests(self, state: object) -> bool:
        """Always: it decides about requests that can be admitted, or lack blocks; its rates know the time."""
        return True

    def observe(self, plan: SchedulePlan, state: _Queue) -> None:
        """Count the work that is admitted."""
        if state.work_s is not None and plan.admitted:
            state.admitted_s += float(state.work_s[[entry.row for entry in plan.admitted]].sum())
        state.is_busy = bool(plan.num_deferred or plan.admitted or plan.running.num_prefills)

    def _admission(
        self, ir: ScheduleIR, cached: npt.NDArray[np.int32], remaining: Floats, begun_ns: Floats
    ) -> Places:
        queue, rows = ir.state, ir.pending
        by_age = by(rows.arrived_time, ir.admission)
        if ir.cost is None:  # the engine's first steps
            return by(remaining, by_age)
        # Prompts alone: they are known, and what they take is admitted at a rate of its own in any load.
        prompts_s = prefill_ns(ir.cost, cached, np.maximum(rows.num_tokens - cached, 1)) / 1e9
        waits_s = queue.waits_s(prompts_s)[by_age]
        begun_s = begun_ns.sum() / 1e9
        latest_s = rows.arrived_time[by_age] + self.patience * queue.longest_s
        slack_s = latest_s - ir.now - queue.slowdown * begun_s - (np.cumsum(waits_s) - waits_s)
        overtakes = np.ones(len(by_age), np.bool_)
        overtakes[1:] = waits_s[1:] <= np.minimum.accumulate(slack_s)[:-1]
        return np.concatenate((by(remaining, by_age[overtakes]), by_age[~overtakes]))

    def _leave_to_shorter(
        self, ir: ScheduleIR, cached: npt.NDArray[np.int32], remaining: Floats, begun_ns: Floats
    ) -> ScheduleIR:
        """Give running prompts what shorter ones of their tenants leave of the step, while they may wait."""
        running, waiting, order = ir.running, ir.pending, ir.admission[: ir.num_free_seats]
        if ir.cost is None or ir.step_target_ms is None:
            return ir  # nothing says when a step is full
        may_wait = running.arrived_time + self.patience * ir.state.longest_s > ir.now
        patient = np.flatnonzero(may_wait & (begun_ns > 0)).tolist()
        if not patient:
            return ir
        if ir.hits(order[:1])[0].num_blocks_needed > ir.available_memory:
            return ir
        left = self._remaining(ir, running, running.num_computed_tokens)
        waiting_ns = prefill_ns(ir.cost, cached, np.maximum(waiting.num_tokens - cached, 1))
        step_ns = 1e6 * ir.step_target_ms - decodes_ns(ir, ir.cost)
        for row in patient:
            tenant, priority = running.tenant[row], running.priority[row]
            is_own = (running.tenant == tenant) & (running.priority >= priority)
            begun_shorter_ns = float(begun_ns.sum(where=is_own & (left < left[row])))
            first = order[(waiting.tenant[order] == tenant) & (waiting.priority[order] >= priority)]
            shorter = first[np.logical_and.accumulate(remaining[first] < left[row])]
            if not begun_shorter_ns and not len(shorter):
                continue
            shorter_ns = begun_shorter_ns + waiting_ns[shorter].sum()
            start = int(running.num_computed_tokens[row])
            num_tokens = max(num_tokens_within(ir.cost, step_ns - shorter_ns, start), 1)
            if begun_shorter_ns:
                ir = ir.cap(num_tokens, running=[row])
            else:
                ir = ir.yield_to_pending(num_tokens, [row])
        return ir

    def _by_priority(self, ir: ScheduleIR, rows: RequestRows, order: Places) -> Places:
        if rows.priority.min() != rows.priority.max():
            order = by(-rows.priority, order)
        oldest = int(rows.arrived_time.argmin())
        if ir.now - float(rows.arrived_time[oldest]) <= self.starvation_s:
            return order
        return np.concatenate(([oldest], order[order != oldest]))

    def _levels(self, ir: ScheduleIR, rows: RequestRows) -> Floats:
        is_starved = ir.now - rows.arrived_time > self.starvation_s
        return np.where(is_starved, np.inf, rows.priority.astype(np.float64))

    def _remaining(self, ir: ScheduleIR, rows: RequestRows, starts: npt.NDArray[np.int32]) -> Floats:
        """Return what each request still takes: nanoseconds, or tokens if the cost is unknown."""
        output = remaining_output(rows, self.min_confidence)
        uncomputed: npt.NDArray[np.int32] = np.maximum(rows.num_tokens - starts, 0)
        if ir.cost is None:
            return uncomputed.astype(np.float64) + output
        contexts = rows.num_tokens + (output / 2).astype(np.int64)
        decodes = output * decode_ns(ir.cost, contexts, len(ir.running) + 1)
        return prefill_ns(ir.cost, starts, uncomputed) + decodes


def _begun_ns(ir: ScheduleIR, cost: StepCost) -> Floats:
    """Return what each running prompt still takes, and 0 for a decode: (running,)."""
    running = ir.running
    taken = prefill_ns(cost, running.num_computed_tokens, running.num_missing)
    return np.where(running.num_missing > 1, taken, 0.0)
