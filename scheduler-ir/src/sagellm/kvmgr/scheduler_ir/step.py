"""The plan of one step, while it grows."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from sagellm.core.protocols.scheduler_ir import Probe, ScheduledRequest, SchedulePlan, ScheduleRequest
from sagellm.kvmgr.scheduler_ir.preemption import Preemption, preemption_order

_last_scheduled_step = attrgetter("last_scheduled_step")


class Step:
    """Spends a token budget and the available blocks, on running requests and then on waiting ones."""

    __slots__ = ("_available", "_block_size", "_budget", "_entries", "_number", "_preempted")

    def __init__(self, *, number: int, block_size: int, budget: int, available: int) -> None:
        self._number = number
        self._block_size = block_size
        self._budget = budget  # tokens left
        self._available = available  # blocks left
        self._entries: list[ScheduledRequest] = []
        self._preempted: list[ScheduleRequest] = []

    def serve(
        self, running: Sequence[ScheduleRequest], order: Sequence[ScheduleRequest] | None = None
    ) -> None:
        """Give running requests their tokens and the blocks that these need.

        `order` says who is preempted first, the last one; None means `preemption_order(running)`.
        Costs one pass over `running`, and a sort where tokens or blocks are short.
        """
        entries, number, block_size = self._entries, self._number, self._block_size
        budget, available = self._budget, self._available
        preemption: Preemption | None = None
        # One token is kept for each request behind, so that no prefill holds up a decode. With
        # fewer tokens than requests they take turns instead, the longest passed over first.
        turns, reserved, share = running, len(running), 1
        if reserved > budget:
            turns = self._rotate(running)
            reserved = share = 0
        for request in turns:
            reserved -= share
            computed = request.num_computed_tokens
            num_tokens = request.num_tokens - computed
            if num_tokens > budget - reserved:
                num_tokens = budget - reserved
            if num_tokens < 1 or (preemption is not None and id(request) in preemption.gone):
                continue
            num_blocks = 0
            uncovered = computed + num_tokens - request.num_blocks * block_size
            if uncovered > 0:
                num_blocks = -(-uncovered // block_size)
                if num_blocks > available:
                    if preemption is None:
                        preemption = Preemption(preemption_order(running) if order is None else list(order))
                        self._preempted = preemption.preempted
                    freed = preemption.make_room(request, num_blocks - available, entries)
                    available += freed.num_blocks
                    budget += freed.num_tokens
                    if id(request) in preemption.gone:
                        continue
                available -= num_blocks
            budget -= num_tokens
            request.last_scheduled_step = number
            entries.append(ScheduledRequest(request, num_tokens, num_blocks))
        self._budget, self._available = budget, available

    def finish(self, pending: Sequence[ScheduleRequest], seats: int, probe: Probe | None) -> SchedulePlan:
        """Admit waiting requests in their order, up to the first that does not fit.

        None is admitted after a preemption: what was just taken would be given away. None
        overtakes another, so none starves. Costs nothing for the requests that stay behind.
        """
        reason: str | None = None
        num_running = len(self._entries)
        if self._preempted:
            reason = "preemption" if pending else None
        else:
            for request in pending:
                reason = self._admit(request, seats, probe)
                if reason is not None:
                    break
                seats -= 1
        num_admitted = len(self._entries) - num_running
        return SchedulePlan(
            scheduled_requests=self._entries,
            preempted_requests=self._preempted,
            num_admitted=num_admitted,
            num_deferred=len(pending) - num_admitted,
            deferred_reason=reason,
        )

    def _rotate(self, running: Sequence[ScheduleRequest]) -> list[ScheduleRequest]:
        """Put the longest passed over first. Equals are rotated, or the first would win each tie."""
        start = self._number * self._budget % len(running)
        turns = [*running[start:], *running[:start]]
        turns.sort(key=_last_scheduled_step)
        return turns

    def _admit(self, request: ScheduleRequest, seats: int, probe: Probe | None) -> str | None:
        """Admit one request; return what is lacking where it does not fit."""
        if seats < 1:
            return "seats"
        if self._budget < 1:
            return "tokens"
        if probe is not None:
            probe(request)
        num_blocks = request.kv_blocks_needed
        if num_blocks is None:
            whole_blocks = -(-request.num_tokens // self._block_size)
            num_blocks = whole_blocks - request.prefix_cache_hit // self._block_size
        if num_blocks > self._available:
            return "blocks"
        # A hit may cover everything: the last token is computed all the same, for its logits.
        num_tokens = min(max(request.num_tokens - request.prefix_cache_hit, 1), self._budget)
        self._budget -= num_tokens
        self._available -= num_blocks
        request.last_scheduled_step = self._number
        self._entries.append(ScheduledRequest(request, num_tokens, num_blocks))
        return None

    @property
    def budget(self) -> int:
        """Tokens that are not spent yet."""
        return self._budget
