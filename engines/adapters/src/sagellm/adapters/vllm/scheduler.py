"""vLLM's V1 schedulers, told by our passes whom to admit, cut, defer and preempt. Written for vLLM 0.32.

vLLM's own `schedule` runs as it is. Its queue yields requests in the passes' order, its limits are lowered
for a step, and the last method that it asks about a request's number of tokens also knows the passes' caps.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler as StockAsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import RequestQueue, SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler as StockScheduler
from vllm.v1.request import Request

from sagellm.adapters.pass_driver import PassDriver
from sagellm.adapters.pass_settings import PassSettings
from sagellm.adapters.request_table import RequestTable
from sagellm.adapters.waiting_queue import WaitingQueue
from sagellm.core import DEFAULT_TENANT, ConfigError, PassMetrics, PluginRegistry, ScheduleRequest, Tenant
from sagellm.core.protocols.request_rows import PrefixHit
from sagellm.core.protocols.scheduler_ir import Admission

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler as _Stock  # what both schedulers are beside it

    from sagellm.adapters.step_decisions import StepDecisions
else:
    _Stock = object

SETTINGS = 'additional_config["sagellm"]'
TENANT, DEADLINE_S = "sagellm_tenant", "sagellm_deadline_s"
"""Entries of a request's `extra_args` (`vllm_xargs` over HTTP): its tenant, and seconds until it is due."""


class _Queue(WaitingQueue[Request], RequestQueue):  # type: ignore[misc]
    """vLLM's `waiting` queue."""


class _WithPasses(_Stock):  # type: ignore[misc]
    """What both schedulers add to those of vLLM."""

    max_num_scheduled_tokens: int
    max_num_active_reqs: int

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        config = self.vllm_config
        given = config.additional_config
        settings = PassSettings.of(given.get("sagellm") if isinstance(given, dict) else given, SETTINGS)
        _refuse_what_is_not_ours(config.scheduler_config)
        self._tenants = {name: Tenant(name, float(weight)) for name, weight in settings.tenants.items()}
        self._table: RequestTable[Request] = RequestTable(
            self.block_size,
            num_schedulable=_num_schedulable,
            tenant_of=self._tenant_of,
            deadline_of=_deadline_of,
            smaller_is_more_urgent=True,
        )
        self._gone: list[Request] = []
        self._driver = PassDriver(
            settings,
            registry=PluginRegistry.load(),
            block_size=self.block_size,
            now=time.time,
            probe=self._probe,
        )
        self._pool = self.kv_cache_manager.block_pool
        self._group_ids = list(range(len(self.kv_cache_config.kv_cache_groups)))
        self._num_groups = max(len(self._group_ids), 1)
        self._has_whole_hashes = self.hash_block_size == self.block_size and not self.has_mamba_layers
        self.waiting: _Queue = _Queue(self._table)

    def pass_metrics(self) -> list[PassMetrics]:
        """Return what each pass has cost and decided so far."""
        return self._driver.metrics()

    @property
    def pass_failures(self) -> Mapping[str, str]:
        """The passes that failed and were removed, and why."""
        return self._driver.failures

    def schedule(self, *arguments: Any, **keywords: Any) -> SchedulerOutput:
        """Plan a step as vLLM does, within what the passes decide."""
        for request in self._gone:
            self._table.drop(request)
        self._gone.clear()
        driver, has_prompts = self._driver, bool(self._inflight_prefills)
        num_free = self._pool.get_num_free_blocks() // self._num_groups
        num_seats = max(self.max_num_active_reqs - self.num_waiting_for_streaming_input, 0)
        if not driver.has_passes or self._pause_state != PauseState.UNPAUSED:
            return super().schedule(*arguments, **keywords)
        if driver.is_resting and self.waiting.is_as_seen and not has_prompts:
            can_admit = len(self.waiting) and len(self.running) < num_seats
            if num_free >= len(self.running) and not can_admit:
                return super().schedule(*arguments, **keywords)
        decisions = driver.decide(
            self.waiting.rows(),
            self._table.running_rows(self.running, has_prompts=has_prompts),
            available_memory=num_free,
            max_num_batched_tokens=self.max_num_scheduled_tokens,
            max_num_seqs=num_seats,
        )
        if decisions is None:
            output = super().schedule(*arguments, **keywords)
        else:
            output = self._schedule_as(decisions, arguments, keywords)
        self._tell(output, has_prompts=has_prompts)
        return output

    def _schedule_as(
        self, decisions: StepDecisions, arguments: Sequence[Any], keywords: Mapping[str, Any]
    ) -> SchedulerOutput:
        """Plan a step within what the passes decide."""
        running, queue = self._table.running(), self.waiting
        caps = {running[row]: cap for row, cap in decisions.running_caps.items()}
        caps |= dict(
            zip(queue.requests_at(decisions.pending_caps), decisions.pending_caps.values(), strict=True)
        )
        limits = self.max_num_scheduled_tokens, self.max_num_active_reqs
        if decisions.admission is not None:
            queue.open(decisions.admission)
        gone = self._preempt([running[row] for row in decisions.preempted])
        if decisions.preemption is not None:
            order = (running[row] for row in decisions.preemption.tolist())
            self.running[:] = [request for request in order if request not in gone]
        self.max_num_scheduled_tokens = min(decisions.max_num_batched_tokens, limits[0])
        streaming = self.num_waiting_for_streaming_input
        self.max_num_active_reqs = min(decisions.max_num_seqs + streaming, limits[1])
        if caps and not self.need_mamba_block_aligned_split:
            self._caps = caps
            self._reserve_prefill_lookahead = self._capped
        try:
            return super().schedule(*arguments, **keywords)
        finally:
            self.max_num_scheduled_tokens, self.max_num_active_reqs = limits
            self.__dict__.pop("_reserve_prefill_lookahead", None)
            queue.close()

    def _preempt(self, requests: Sequence[Request]) -> set[Request]:
        """Preempt running requests as `schedule` does; return those whose blocks can be freed now."""
        gone = {request for request in requests if self._request_blocks_can_be_freed(request)}
        if gone:
            now = time.monotonic()
            self.running[:] = [request for request in self.running if request not in gone]
            for request in requests:
                if request in gone:
                    self._preempt_request(request, now, drop_stale_output=self.requires_kv_delivery)
        return gone

    def _capped(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Return how many tokens of a request this step computes: vLLM asks it last."""
        cap = self._caps.get(request, num_new_tokens)
        if cap < num_new_tokens:
            num_new_tokens = cap and max(cap, min(1 + self.num_spec_tokens, num_new_tokens))
        num: int = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        return num

    def _tell(self, output: SchedulerOutput, *, has_prompts: bool) -> None:
        """Tell the passes what was planned."""
        scheduled, table = output.num_scheduled_tokens, self._table
        running, taken = table.running(), self.waiting.taken()
        admitted = []
        for position, request in taken.items():
            if (num_tokens := scheduled.get(request.request_id)) is not None:
                hit = request.num_computed_tokens - num_tokens
                num_blocks = -(-request.num_tokens // self.block_size) - hit // self.block_size
                admitted.append(Admission(position, num_tokens, num_blocks, hit))
        preempted = output.preempted_req_ids or ()
        self._driver.observe(
            scheduled,
            running,
            admitted=admitted,
            preempted=[i for i, each in enumerate(running) if each.request_id in preempted]
            if preempted
            else (),
        )
        table.scheduled(self._driver.step, scheduled, taken.values())
        if has_prompts or admitted or preempted or output.finished_req_ids:
            self._driver.cache_changed()

    def _free_request(self, request: Request, *arguments: Any, **keywords: Any) -> Any:
        self._gone.append(request)  # it may still stand in a queue
        return super()._free_request(request, *arguments, **keywords)

    def _probe(self, row: ScheduleRequest) -> PrefixHit:
        """Return what vLLM's prefix cache has of a waiting request; what a connector has is not asked for."""
        request, manager = self.requests[row.request_id], self.kv_cache_manager
        num_blocks = -(-request.num_tokens // self.block_size)
        if manager.enable_kv_cache_events and request.kv_cache_report_mode == "full":
            return PrefixHit(0, num_blocks)  # each look would be reported as a use
        if self._has_whole_hashes and not self._has_first(request):
            return PrefixHit(0, num_blocks)  # at a fifth of the cost
        blocks, num_tokens, _ = manager.get_computed_blocks(request)
        num_in_use = sum(block.ref_cnt > 0 for block in blocks.blocks[0]) if num_tokens else 0
        return PrefixHit(num_tokens, num_blocks - num_in_use)

    def _has_first(self, request: Request) -> bool:
        """Say whether the first block of a request is cached, in all KV groups."""
        if not request.block_hashes:
            return False
        return self._pool.get_cached_block(request.block_hashes[0], self._group_ids) is not None

    def _tenant_of(self, request: Request) -> Tenant:
        name = _extra(request, TENANT)
        if not isinstance(name, str):
            return DEFAULT_TENANT
        return self._tenants.get(name) or Tenant(name)


def _extra(request: Request, name: str) -> Any:
    params = request.sampling_params
    return None if params is None or params.extra_args is None else params.extra_args.get(name)


def _deadline_of(request: Request) -> float:
    seconds = _extra(request, DEADLINE_S)
    if not isinstance(seconds, int | float):
        return float("inf")
    return float(request.arrival_time + seconds)


def _num_schedulable(request: Request) -> int:
    num: int = request.num_tokens + request.num_output_placeholders
    return num


def _refuse_what_is_not_ours(config: Any) -> None:
    if SchedulingPolicy(config.policy) != SchedulingPolicy.FCFS:
        raise ConfigError(
            f"scheduling_policy is {config.policy}; with sageLLM's passes it must be fcfs, and the pass "
            '"order=priority" serves by priority'
        )
    if not config.enable_chunked_prefill:
        raise ConfigError("enable_chunked_prefill is false; sageLLM's passes cut prompts, so it must be true")


class Scheduler(_WithPasses, StockScheduler):  # type: ignore[misc]
    """vLLM's scheduler with our passes, for `async_scheduling=False`."""


class AsyncScheduler(_WithPasses, StockAsyncScheduler):  # type: ignore[misc]
    """vLLM's scheduler of overlapped steps with our passes."""
