"""Serves first what ends soonest: shortest remaining processing time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np

from sagellm.core.plugins.options import Limits
from sagellm.core.protocols.scheduler_ir import ScheduleIR, SchedulerPassProtocol
from sagellm.kvmgr.scheduler_ir.passes.estimates import decode_ns, prefill_ns, remaining_output
from sagellm.kvmgr.scheduler_ir.passes.known_hits import KnownHits
from sagellm.kvmgr.scheduler_ir.passes.ordering import (
    by,
    may_lack_blocks,
    order_pending,
    order_running,
    starved_first,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    from sagellm.core.protocols.request_rows import RequestRows

    Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LifetimeAwarePass(SchedulerPassProtocol):
    """Orders admission and preemption by the time that each request still takes, the shortest first.

    That is the time of its uncached prompt and of its predicted output, by the fitted cost of steps; in
    tokens while that is unknown. Predictions below `min_confidence` are not trusted: such a request counts
    with what `max_tokens` leaves it, or with `untrusted=mean` as the mean of the trusted ones. A request
    older than `starvation_s` goes before all others. A step looks up at most `max_probes` requests in the
    prefix cache.
    """

    name = "lifetime"
    min_confidence: Annotated[float, Limits(ge=0, le=1)] = 0.3
    untrusted: Literal["max", "mean"] = "max"
    starvation_s: Annotated[float, Limits(gt=0)] = 30.0
    max_probes: Annotated[int, Limits(ge=1, le=1 << 20)] = 32

    def start(self) -> KnownHits:
        """Return a state without known hits."""
        return KnownHits()

    def run(self, ir: ScheduleIR) -> ScheduleIR:
        """Order both parts, if that can matter. O((waiting + running) · log)."""
        before = ir.now - self.starvation_s
        if ir.can_admit and len(ir.pending) > 1:
            hits: KnownHits = ir.state
            cached = hits.update(ir, self.max_probes, lambda rows: [hit.num_tokens for hit in ir.hits(rows)])
            order = by(self._remaining(ir, ir.pending, cached), ir.admission)
            ir = order_pending(ir, starved_first(ir.pending, order, before))
        if may_lack_blocks(ir):
            order = by(self._remaining(ir, ir.running, ir.running.num_computed_tokens), ir.preemption)
            ir = order_running(ir, starved_first(ir.running, order, before))
        return ir

    def _remaining(self, ir: ScheduleIR, rows: RequestRows, starts: npt.NDArray[np.int32]) -> Floats:
        """Return what each request still takes: nanoseconds, or tokens if the cost is unknown."""
        output = remaining_output(rows, self.min_confidence, is_mean_used=self.untrusted == "mean")
        uncomputed: npt.NDArray[np.int32] = np.maximum(rows.num_tokens - starts, 0)
        if ir.cost is None:
            return uncomputed.astype(np.float64) + output
        contexts = rows.num_tokens + (output / 2).astype(np.int64)
        decodes = output * decode_ns(ir.cost, contexts, len(ir.running) + 1)
        return prefill_ns(ir.cost, starts, uncomputed) + decodes
