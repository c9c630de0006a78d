"""Equal service for tenants by weight: the virtual token counter of arXiv 2401.00588 (Sheng et al., 2024)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import numpy as np

from sagellm.core.plugins.options import Limits
from sagellm.core.protocols.request_rows import RequestRows
from sagellm.core.protocols.scheduler_ir import (
    ScheduleIR,
    SchedulePlan,
    SchedulerPassProtocol,
)
from sagellm.core.step_cost import StepWork
from sagellm.kvmgr.scheduler_ir.passes.estimates import prefill_ns
from sagellm.kvmgr.scheduler_ir.passes.ordering import may_lack_blocks, trusted_priority

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
    prompt_budget: float = np.inf  # tokens of prompts that a step computes, as far as seen
    is_capped: bool = False  # this step cuts prompts itself, so that it shows no budget

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

    def shares(self) -> npt.NDArray[np.float64]:
        """Return the part of everything that each tenant may have: (tenants,), 0 without requests."""
        weights: npt.NDArray[np.float64] = np.where(self.is_active, self.weights, 0.0)
        shares: npt.NDArray[np.float64] = weights / weights.sum()
        return shares

    def measure(self, plan: SchedulePlan) -> None:
        """Note how many tokens of prompts the step has, if it cuts one, or if that is more than before."""
        running, rows = plan.running, plan.rows
        left = running.num_tokens[rows] - running.num_computed_tokens[rows] - plan.num_tokens
        num_tokens = float(plan.num_tokens.sum(where=plan.num_tokens > 1))
        num_tokens += sum(entry.num_tokens for entry in plan.admitted)
        if plan.admitted:
            last = plan.admitted[-1]
            is_cut = last.hit + last.num_tokens < int(plan.pending.num_tokens[last.row])
        else:
            is_cut = bool((left > 0).any())
        if (is_cut and num_tokens and not self.is_capped) or self.prompt_budget < num_tokens:
            self.prompt_budget = num_tokens

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
    priority of trusted tenants go before all others; no other priority matters to another tenant. When all
    seats or blocks are taken, a tenant that holds less than its share gets some from those that hold more
    and were served as much: their last requests are preempted. A request that lacks blocks takes them from
    the tenant that holds the most for its weight. While the tenant served least has a prompt, running
    prompts of others get what it leaves of the step, and where it holds little, decodes of others make way
    too. With one tenant it does nothing.
    """

    name = "fair-share"
    prompt_cost: Annotated[float, Limits(ge=0, le=10**9)] = 1.0
    output_cost: Annotated[float, Limits(ge=0, le=10**9)] = 2.0

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
        num_waiting = np.bincount(waiting, minlength=len(accounts.codes))
        num_running = np.bincount(running, minlength=len(accounts.codes))
        accounts.activate(num_waiting + num_running > 0)
        if ir.deferred:
            num_waiting -= np.bincount(waiting[list(ir.deferred)], minlength=len(accounts.codes))
        if num_waiting.any():
            ir = self._make_room(ir, waiting, running, num_waiting, num_running)
        if ir.can_admit:
            ir = self._trusted_first(ir.order_pending(self._interleaved(ir, waiting, num_running)))
        if may_lack_blocks(ir):
            by_rank = ir.preemption
            held = np.bincount(running, ir.running.num_blocks, len(accounts.codes)) / accounts.weights
            order = np.lexsort((held[running[by_rank]], -trusted_priority(ir.running)[by_rank]))
            ir = ir.order_running(by_rank[order])
        return self._leave_time(ir, waiting, running, num_running)

    def rests(self, state: _Accounts) -> bool:
        """Say whether one tenant is alone: several are charged for each token."""
        return not state.is_shared

    def observe(self, plan: SchedulePlan, state: _Accounts) -> None:
        """Charge each tenant for what is computed for it."""
        if not state.is_shared:
            return
        state.measure(plan)
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

    def _interleaved(self, ir: ScheduleIR, places: Places, num_running: Places) -> Places:
        """Return the order in which the tenants' own queues are served when each is charged as it goes.

        Of those served equally, as after one was idle, the one with the fewest running requests is first.
        """
        accounts: _Accounts = ir.state
        order = ir.admission
        by_tenant = order[np.argsort(places[order], kind="stable")]
        tenants = places[by_tenant]
        cost = self.prompt_cost * ir.pending.num_tokens[by_tenant] / accounts.weights[tenants]
        before = np.cumsum(cost) - cost
        first = np.searchsorted(tenants, tenants)  # of the tenant's own rows
        begin = accounts.served[tenants] + before - before[first]
        return by_tenant[np.lexsort((num_running[tenants], begin))]

    def _trusted_first(self, ir: ScheduleIR) -> ScheduleIR:
        """Let urgent requests of trusted tenants pass those of others."""
        if not ir.can_admit or not ir.pending.is_trusted.any():
            return ir
        urgency = trusted_priority(ir.pending)
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
        share = accounts.shares()
        victims: list[int] = []
        seats = np.maximum((share * ir.max_num_seqs).astype(np.intp), 1)
        missing = np.minimum(num_waiting, np.maximum(seats - num_running, 0))
        num_missing = int(missing.sum()) - max(ir.num_free_seats, 0)
        if num_missing > 0:
            urgent = np.bincount(running, trusted_priority(ir.running) > 0, len(seats)).astype(np.intp)
            excess = np.clip(num_running - seats, 0, num_running - urgent)
            # What a tenant served more gives up would go to it, not to those that were served more than it.
            excess[accounts.served < accounts.served[missing > 0].min()] = 0
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
        by_rank = by_rank[trusted_priority(ir.running)[by_rank] == 0]
        for tenant in np.argsort(-served).tolist():
            if excess[tenant] > 0:
                rows = by_rank[running[by_rank] == tenant]
                victims += rows[: min(int(excess[tenant]), num_wanted - len(victims))].tolist()
            if len(victims) == num_wanted:
                break
        return victims

    def _leave_time(
        self, ir: ScheduleIR, waiting: Places, running: Places, num_running: Places
    ) -> ScheduleIR:
        """Let the prompts of the tenant served least have their tokens and their time in this step.

        Running prompts of others get the tokens that these leave; without that, a long prompt would take each
        step's budget up to its end. If the tenant holds less than half of its seats, as one that sends little
        beside a flood, decodes of others take about as long as its prompts, and the rest sit the step out,
        in turns.
        """
        accounts: _Accounts = ir.state
        accounts.is_capped = False
        missing = ir.running.num_missing
        is_prompt = missing > 1
        order = ir.admission if ir.can_admit else ir.admission[:0]
        if ir.deferred:
            order = order[~np.isin(order, list(ir.deferred))]
        tenants = np.unique(np.concatenate((running[is_prompt], waiting[order])))
        if not len(tenants):
            return ir
        least = tenants[np.lexsort((num_running[tenants], accounts.served[tenants]))[0]]
        is_other = (running != least) & (trusted_priority(ir.running) == 0)
        started = is_prompt & (running == least)
        needed = int(missing[started].sum())
        own = order[waiting[order] == least]
        if len(own):
            needed += int(ir.pending.num_tokens[own[0]])
        budget = min(accounts.prompt_budget, ir.max_num_batched_tokens)
        has_few = 2 * num_running[least] < accounts.shares()[least] * ir.max_num_seqs
        if has_few and (not len(own) or _has_blocks(ir, int(own[0]))):
            num_computed = int(ir.running.num_computed_tokens[started].max(initial=0))
            ir = self._sit_out(ir, is_other & (missing == 1), num_computed, int(min(needed, budget)))
        num_prompts = int(np.count_nonzero(is_other & is_prompt))
        if not num_prompts:
            return ir
        accounts.is_capped = True
        return ir.cap(max(int(budget - needed) // num_prompts, 1), running=is_other & is_prompt)

    def _sit_out(
        self, ir: ScheduleIR, is_decode: npt.NDArray[np.bool_], num_computed: int, num_tokens: int
    ) -> ScheduleIR:
        """Cap decodes at 0, but for those that sat out longest and together take as long as a prompt's step.

        That computes `num_tokens` behind `num_computed`.
        """
        rows = np.flatnonzero(is_decode)
        rows = rows[~np.isin(rows, list(ir.preempted))]
        if ir.cost is None or not len(rows):
            return ir
        context = int(ir.running.num_tokens[rows].sum(dtype=np.int64))
        base_ns = ir.cost.base_ns
        decodes_ns = ir.cost.predict_ns(StepWork(len(rows), len(rows), context, context)) - base_ns
        prompt_ns = base_ns + prefill_ns(ir.cost, np.array([num_computed]), np.array([num_tokens])).item()
        if decodes_ns <= prompt_ns:
            return ir
        num_kept = max(int(len(rows) * prompt_ns / decodes_ns), 1)
        rows = np.roll(rows, -(ir.step * num_kept % len(rows)))
        rows = rows[np.argsort(ir.running.last_scheduled_step[rows], kind="stable")]
        return ir.cap(0, running=rows[num_kept:])

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
        by_rank = by_rank[trusted_priority(ir.running)[by_rank] == 0]
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


def _has_blocks(ir: ScheduleIR, row: int) -> bool:
    """Say whether a waiting request can be admitted even if each running one takes a block first."""
    given_up = int(ir.running.num_blocks[list(ir.preempted)].sum())
    available = ir.available_memory + given_up - len(ir.running) + len(ir.preempted)
    return ir.hits([row])[0].num_blocks_needed <= available


def _is_one_tenant(ir: ScheduleIR) -> bool:
    pending, running = ir.pending, ir.running
    if not (pending.has_one_tenant and running.has_one_tenant):
        return False
    return not len(pending) or not len(running) or bool(pending.tenant[0] == running.tenant[0])
