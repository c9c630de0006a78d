"""Keeps the queues and carries out what the scheduler IR decides."""

from __future__ import annotations

from bisect import insort
from dataclasses import replace

from sagellm.core import (
    OutOfBlocksError,
    RequestStatus,
    SchedulePlan,
    ScheduleRequest,
    SchedulerIRProtocol,
    SequenceId,
    UnknownRequestError,
)
from sagellm.engines.core.batching import BatchingMeter
from sagellm.engines.core.kv_cache_manager import KVCacheManager
from sagellm.engines.core.sequence import ScheduledSequence, Sequence

MAX_SCORED_POSITIONS = 256
"""Positions of prompts that one step scores; each has a row of logits as long as the vocabulary."""


class Scheduler:
    """Two queues of sequences, and the blocks that those which run hold.

    The IR decides from numbers which sequences compute how many tokens; this class takes and
    gives back the blocks. Where a block turns out to be missing after all, the sequence just
    sits the step out: the next decision is made from exact numbers again.
    """

    def __init__(self, ir: SchedulerIRProtocol, kv: KVCacheManager, batching: BatchingMeter) -> None:
        self._ir = ir
        self._kv = kv
        self._batching = batching
        self._sequences: dict[SequenceId, Sequence] = {}
        self._waiting: list[ScheduleRequest] = []  # in the order of admission
        self._running: list[ScheduleRequest] = []  # in the order of their first admission
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        """Sequences that hold no blocks."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._running)

    @property
    def sequence_ids(self) -> list[SequenceId]:
        """All sequences, waiting or running."""
        return list(self._sequences)

    @property
    def num_live_tokens(self) -> int:
        """Tokens of running sequences whose KV is stored."""
        return sum(request.num_computed_tokens for request in self._running)

    def __contains__(self, sequence_id: SequenceId) -> bool:
        return sequence_id in self._sequences

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        insort(self._waiting, sequence.schedule, key=_admission_order)
        self._sequences[sequence.sequence_id] = sequence

    def probe(self, request: ScheduleRequest) -> None:
        """Refresh what the admission of a waiting request would reuse and take."""
        self._kv.probe(self._sequences[_sequence_id(request)])

    def schedule(self) -> list[ScheduledSequence]:
        """Decide on a step and take the blocks that it needs."""
        available_blocks = self._kv.available_blocks
        plan = self._ir.schedule(
            pending_requests=self._waiting,
            running_requests=self._running,
            available_memory=available_blocks,
        )
        if self._waiting:
            self._batching.measure(
                plan,
                waiting=self._waiting,
                running=self._running,
                available_blocks=available_blocks,
                num_blocks_for=self._kv.num_blocks_for,
            )
        for request in plan.preempted_requests:
            self._preempt(self._sequences[_sequence_id(request)])
        scheduled = self._grow_running(plan) + self._admit(plan)
        if plan.scheduled_requests and not scheduled and not self._kv.num_fetches:
            # The eviction policy keeps what must go before anything can run; clearing asks no policy.
            self._kv.clear_cache()
            scheduled = self._grow_running(plan) + self._admit(plan)
        return limit_scored(scheduled, MAX_SCORED_POSITIONS)

    def shut_out(self) -> Sequence | None:
        """Return the first that waits if nothing runs and not even then there is room for it."""
        if self._running or not self._waiting:
            return None
        request = self._waiting[0]
        self.probe(request)
        is_shut_out = (request.kv_blocks_needed or 0) > self._kv.available_blocks
        return self._sequences[_sequence_id(request)] if is_shut_out else None

    def finish(self, sequence_id: SequenceId, status: RequestStatus) -> Sequence:
        """Free the blocks of a sequence and take it out. Raises UnknownRequestError if it is not live.

        Where a module raises, the sequence has no blocks left but is still live; call again.
        """
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            raise UnknownRequestError(f"no live request has the id {sequence_id!r}")
        self._kv.release(sequence, is_sound=status is not RequestStatus.FINISHED_ERROR)
        del self._sequences[sequence_id]
        queue = self._waiting if sequence.status is RequestStatus.WAITING else self._running
        queue.remove(sequence.schedule)
        sequence.status = status
        return sequence

    def _grow_running(self, plan: SchedulePlan) -> list[ScheduledSequence]:
        scheduled = []
        num_running = len(plan.scheduled_requests) - plan.num_admitted
        for entry in plan.scheduled_requests[:num_running]:
            sequence = self._sequences[_sequence_id(entry.request)]
            start = entry.request.num_computed_tokens
            try:
                self._kv.grow(sequence, start + entry.num_tokens)
            except OutOfBlocksError:
                continue
            scheduled.append(ScheduledSequence(sequence, start, entry.num_tokens))
        return scheduled

    def _admit(self, plan: SchedulePlan) -> list[ScheduledSequence]:
        scheduled = []
        num_running = len(plan.scheduled_requests) - plan.num_admitted
        for entry in plan.scheduled_requests[num_running:]:
            sequence = self._sequences[_sequence_id(entry.request)]
            try:
                if self._kv.is_fetching(sequence):
                    continue
                self._kv.admit(sequence)
            except OutOfBlocksError:
                break
            sequence.status = RequestStatus.RUNNING
            self._waiting.remove(entry.request)
            insort(self._running, entry.request, key=_admission_order)
            start = entry.request.num_computed_tokens
            num_tokens = min(entry.num_tokens, sequence.num_tokens - start)
            scheduled.append(ScheduledSequence(sequence, start, num_tokens))
        return scheduled

    def _preempt(self, sequence: Sequence) -> None:
        self._kv.release(sequence)
        self._running.remove(sequence.schedule)
        sequence.status = RequestStatus.WAITING
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        insort(self._waiting, sequence.schedule, key=_admission_order)


def limit_scored(scheduled: list[ScheduledSequence], most: int) -> list[ScheduledSequence]:
    """Cut sequences short where a step would score more than `most` positions; the rest waits its turn."""
    if all(entry.sequence.num_scored >= entry.sequence.num_to_score for entry in scheduled):
        return scheduled
    kept = []
    for entry in scheduled:
        scored = entry.scored
        if len(scored) > most:
            entry = replace(entry, num_tokens=scored.start + most - entry.start)
        most -= len(entry.scored)
        if entry.num_tokens:
            kept.append(entry)
    return kept


def _admission_order(request: ScheduleRequest) -> tuple[int, float]:
    return (-request.priority, request.arrived_time)


def _sequence_id(request: ScheduleRequest) -> SequenceId:
    return SequenceId(request.request_id)
