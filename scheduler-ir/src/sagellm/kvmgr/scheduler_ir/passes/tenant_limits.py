"""Limits what one tenant runs at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from sagellm.core.plugins.options import Limits
from sagellm.core.protocols.scheduler_ir import ScheduleIR, SchedulerPassProtocol


@dataclass(frozen=True)
class AdmissionLimitPass(SchedulerPassProtocol):
    """Defers requests of a tenant that runs `max_seats` requests, or whose requests have `max_tokens` tokens.

    Others overtake them. A tenant without a running request may always start one.
    """

    name = "tenant-limits"
    max_seats: Annotated[int, Limits(ge=1, le=1 << 40)] | None = None
    max_tokens: Annotated[int, Limits(ge=1, le=1 << 40)] | None = None

    def run(self, ir: ScheduleIR) -> ScheduleIR:
        """Defer what exceeds the limits, counting in the order so far. O((waiting + running) · log)."""
        if not ir.can_admit or (self.max_seats is None and self.max_tokens is None):
            return ir
        is_kept = np.ones(len(ir.running), np.bool_)
        is_kept[list(ir.preempted)] = False
        codes, tenants = np.unique(
            np.concatenate((ir.pending.tenant, ir.running.tenant[is_kept])), return_inverse=True
        )
        waiting, running = tenants[: len(ir.pending)], tenants[len(ir.pending) :]
        order = ir.admission[np.argsort(waiting[ir.admission], kind="stable")]
        first = np.searchsorted(waiting[order], waiting[order])  # of the tenant's own rows
        num_running = np.bincount(running, minlength=len(codes))[waiting[order]]
        num_before = num_running + np.arange(len(order)) - first
        is_over = np.zeros(len(order), np.bool_)
        if self.max_seats is not None:
            is_over |= num_before >= self.max_seats
        if self.max_tokens is not None:
            held = np.bincount(running, ir.running.num_tokens[is_kept], len(codes))[waiting[order]]
            total = np.cumsum(ir.pending.num_tokens[order], dtype=np.int64)
            before = total - ir.pending.num_tokens[order]
            is_over |= (held + total - before[first] > self.max_tokens) & (num_before > 0)
        return ir.defer(np.sort(order[is_over]), "its tenant's limit")

    def rests(self, state: object) -> bool:
        """Always: it decides about requests that can be admitted."""
        return True
