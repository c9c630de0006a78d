"""Equal service for tenants by weight: the virtual token counter of arXiv 2401.00588 (Sheng et al., 2024)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from sagellm.core.protocols.scheduler_ir import RequestRows, ScheduleIR, SchedulePlan, SchedulerPassProtocol
from sagellm.kvmgr.scheduler_ir.passes.options import require_between
from sagellm.kvmgr.scheduler_ir.passes.ordering import may_lack_blocks

if TYPE_CHECKING:
    import numpy.typing as npt

    Places = npt.NDArray[np.intp]

_MAX_KEPT = 4096
"""Tenants whose counters are kept while they have no request."""


@dataclass(slots=True)
class _Accounts:
    """The tenants seen, by code in ascending order; each field is (tenants,)."""

    codes: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    served: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty(0))  # cost ÷ weight
    weights: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    is_active: npt.NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))
    is_shared: bool = False  # several tenants are active; if not, nothing has to be counted

    def places(self, rows: RequestRows) -> Places:
        """Return the place of each row's tenant, adding those that are new."""
        tenant = rows.tenant
        place = np.minimum(self.codes.searchsorted(tenant), max(len(self.codes) - 1, 0))
        if len(self.codes) and (self.codes[place] == tenant).all():
            return place
        codes, first = np.unique(tenant, return_index=True)
        is_new = ~np.isin(codes, self.codes)
        num_new = int(is_new.sum())
        all_codes = np.concatenate((self.codes, codes[is_new]))
        order = np.argsort(all_codes)
        self.codes = all_codes[order]
        self.served = np.concatenate((self.served, np.zeros(num_new)))[order]
        weights = rows.weight[first[is_new]].astype(np.float64)
        self.weights = np.concatenate((self.weights, weights))[order]
        self.is_active = np.concatenate((self.is_active, np.zeros(num_new, np.bool_)))[order]
        return self.codes.searchsorted(tenant)

    def activate(self, is_present: npt.NDArray[np.bool_]) -> None:
        """Raise tenants that come back to the least served one that stayed: idling saves nothing."""
        is_back = is_present & ~self.is_active
        if is_back.any():
            stayed = is_present & self.is_active
            if stayed.any():
                self.served[is_back] = np.maximum(self.served[is_back], self.served[stayed].min())
        self.is_active = is_present

    def forget(self) -> None:
        """Drop tenants without requests if there are too many."""
        if len(self.codes) > _MAX_KEPT:
            kept = self.is_active
            self.codes, self.served = self.codes[kept], self.served[kept]
            self.weights, self.is_active = self.weights[kept], self.is_active[kept]


@dataclass(frozen=True)
class FairSharePass(SchedulerPassProtocol):
    """Admits first the tenant that was served least for its weight, and keeps each tenant's own order.

    A computed prompt token costs `prompt_cost`, an output token `output_cost`. Requests with a positive
    priority of trusted tenants go before all others. When all seats or blocks are taken, a tenant that holds
    less than its share gets some from those that hold more: their last requests are preempted. With one
    tenant it does nothing.
    """

    prompt_cost: float = 1.0
    output_cost: float = 2.0

    def __post_init__(self) -> None:
        require_between(self, 0, 1e9, "prompt_cost", "output_cost")

    @property
    def name(self) -> str:
        """`fair-share`."""
        return "fair-share"

    def start(self) -> _Accounts:
        """Return accounts without tenants."""
        return _Accounts()

    def run(self, ir: ScheduleIR) -> ScheduleIR:
        """Order both parts by tenant, if there are several. O((running + waiting) · log)."""
        accounts: _Accounts = ir.state
        accounts.is_shared = not _is_one_tenant(ir)
        if not accounts.is_shared:
            return self._trusted_first(ir)
        running, num_known = accounts.places(ir.running), len(accounts.codes)
        waiting = accounts.places(ir.pending)
        if len(accounts.codes) > num_known:
            running = accounts.places(ir.running)  # the waiting ones have moved the places
        is_deferred = np.zeros(len(waiting), np.bool_)
        is_deferred[list(ir.deferred)] = True
        num_waiting = np.bincount(waiting[~is_deferred], minlength=len(accounts.codes))
        num_running = np.bincount(running, minlength=len(accounts.codes))
        accounts.activate(np.bincount(waiting, minlength=len(accounts.codes)) + num_running > 0)
        if num_waiting.any():
            ir = self._make_room(ir, waiting, running, num_waiting, num_running)
        if ir.can_admit:
            ir = self._trusted_first(ir.order_pending(self._interleaved(ir, waiting)))
        if may_lack_blocks(ir):
            by_rank = ir.preemption
            order = np.argsort(accounts.served[running[by_rank]], kind="stable")
            ir = ir.order_running(by_rank[order])
        return ir

    def observe(self, plan: SchedulePlan, state: _Accounts) -> None:
        """Charge each tenant for what is computed for it."""
        if not state.is_shared:
            return
        if len(plan.rows):
            running, rows = plan.running, plan.rows
            computed, known = running.num_computed_tokens[rows], running.num_tokens[rows]
            is_decode = computed >= running.num_prompt_tokens[rows]
            cost = self.prompt_cost * (plan.num_tokens - is_decode)
            cost += self.output_cost * (computed + plan.num_tokens >= known)
            places = state.codes.searchsorted(running.tenant[rows])
            state.served += np.bincount(places, cost, len(state.codes)) / state.weights
        if plan.admitted:
            rows = np.array([entry.row for entry in plan.admitted])
            places = state.codes.searchsorted(plan.pending.tenant[rows])
            tokens = np.array([entry.num_tokens for entry in plan.admitted])
            state.served += self.prompt_cost * np.bincount(places, tokens, len(state.codes)) / state.weights
        state.forget()

    def _interleaved(self, ir: ScheduleIR, places: Places) -> Places:
        """Return the order in which the tenants' own queues are served when each is charged as it goes."""
        accounts: _Accounts = ir.state
        order = ir.admission
        by_tenant = order[np.argsort(places[order], kind="stable")]
        tenants = places[by_tenant]
        cost = self.prompt_cost * ir.pending.num_tokens[by_tenant] / accounts.weights[tenants]
        before = np.cumsum(cost) - cost
        first = np.searchsorted(tenants, tenants)  # of the tenant's own rows
        begin = accounts.served[tenants] + before - before[first]
        return by_tenant[np.argsort(begin, kind="stable")]

    def _trusted_first(self, ir: ScheduleIR) -> ScheduleIR:
        """Let urgent requests of trusted tenants pass those of others."""
        if not ir.can_admit or not ir.pending.is_trusted.any():
            return ir
        urgency = np.where(ir.pending.is_trusted, np.maximum(ir.pending.priority, 0), 0)
        if not urgency.any():
            return ir
        order = ir.admission
        return ir.order_pending(order[np.argsort(-urgency[order], kind="stable")])

    def _make_room(
        self,
        ir: ScheduleIR,
        waiting: Places,
        running: Places,
        num_waiting: npt.NDArray[np.intp],
        num_running: npt.NDArray[np.intp],
    ) -> ScheduleIR:
        """Preempt requests of tenants above their share for waiting ones of tenants below it."""
        accounts: _Accounts = ir.state
        weights = np.where(accounts.is_active, accounts.weights, 0)
        share = weights / weights.sum()
        victims: list[int] = []
        seats = np.maximum((share * ir.max_num_seqs).astype(np.intp), 1)
        num_missing = int(np.minimum(num_waiting, np.maximum(seats - num_running, 0)).sum())
        num_missing -= max(ir.num_free_seats, 0)
        if num_missing > 0:
            excess = np.maximum(num_running - seats, 0)
            victims = self._last_of(ir, running, excess, num_missing)
        elif ir.can_admit and len(ir.running):
            victims = self._block_victims(ir, waiting, running, share)
        return ir.preempt(victims) if victims else ir

    def _last_of(
        self, ir: ScheduleIR, running: Places, excess: npt.NDArray[np.intp], num_wanted: int
    ) -> list[int]:
        """Return the last rows of tenants, at most `excess` of each, the most served tenant first."""
        served = ir.state.served
        victims: list[int] = []
        by_rank = ir.preemption[::-1]
        for tenant in np.argsort(-served).tolist():
            if excess[tenant] > 0:
                rows = by_rank[running[by_rank] == tenant]
                victims += rows[: min(int(excess[tenant]), num_wanted - len(victims))].tolist()
            if len(victims) == num_wanted:
                break
        return victims

    def _block_victims(
        self, ir: ScheduleIR, waiting: Places, running: Places, share: npt.NDArray[np.float64]
    ) -> list[int]:
        """Return whom to preempt for the least served tenant's first request, if it lacks blocks."""
        num_held = np.bincount(running, ir.running.num_blocks, len(share))
        total = num_held.sum() + ir.available_memory
        order = ir.admission
        if ir.deferred:
            order = order[~np.isin(order, list(ir.deferred))]
        head = int(order[np.argmin(ir.state.served[waiting[order]])])
        tenant = waiting[head]
        num_lacking = -(-int(ir.pending.num_tokens[head]) // ir.block_size) - ir.available_memory
        if num_lacking <= 0:
            return []
        num_lacking = ir.hits([head])[0].num_blocks_needed - ir.available_memory
        if num_lacking <= 0 or num_held[tenant] + num_lacking > share[tenant] * total:
            return []
        victims: list[int] = []
        by_rank = ir.preemption[::-1]
        spare = num_held - share * total
        for row in by_rank.tolist():
            num_blocks = int(ir.running.num_blocks[row])
            if running[row] != tenant and spare[running[row]] >= num_blocks > 0:
                victims.append(row)
                spare[running[row]] -= num_blocks
                num_lacking -= num_blocks
            if num_lacking <= 0:
                return victims
        return []


def _is_one_tenant(ir: ScheduleIR) -> bool:
    columns = [rows.tenant for rows in (ir.pending, ir.running) if len(rows)]
    return not columns or all((column == columns[0][0]).all() for column in columns)
