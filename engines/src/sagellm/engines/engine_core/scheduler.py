"""Keeps the queues and carries out what the scheduler IR decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sagellm.core import (
    Decision,
    OutOfBlocksError,
    PassError,
    PrefixHit,
    RequestRows,
    SchedulePlan,
    ScheduleRequest,
    SchedulerIRProtocol,
    SequenceId,
    UnknownRequestError,
)
from sagellm.core.protocols.step import Seat
from sagellm.engines.engine_core.batching import BatchingMeter
from sagellm.engines.engine_core.decision_log import DecisionLog
from sagellm.engines.engine_core.kv_cache_manager import KVCacheManager
from sagellm.engines.engine_core.pass_admin import PassAdmin
from sagellm.engines.engine_core.seats import Places, RemainingColumns
from sagellm.engines.engine_core.sequence import RequestStatus, Sequence
from sagellm.engines.engine_core.speculation import Speculation
from sagellm.engines.engine_core.step_runner import PlannedStep
from sagellm.engines.engine_core.waiting import WaitingRows, place_of, schedule_request

Ints = npt.NDArray[np.int32]

MAX_SCORED_POSITIONS = 256
"""Positions of prompts that one step scores; each has a row of logits as long as the vocabulary."""


class Foresight(Protocol):
    """Says how long steps stay the same, where outputs are known before they are drawn."""

    def __call__(self, seats: Places, num_computed: Ints, *, num_steps: int, deadline_s: float) -> int:
        """Return how many of `num_steps` steps in a row these decodes compute before something happens.

        Nobody arrives and no output ends before the last of them is over, and none begins after the deadline.
        """


_COMPLETE = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


class Scheduler:
    """The waiting and the running sequences, and the blocks that the running ones hold.

    The IR decides from columns which sequences compute how many tokens; this class takes and returns the
    blocks. If a block turns out to be missing after all, the sequence just sits the step out: the next
    decision starts from exact numbers again.
    """

    def __init__(  # noqa: PLR0913
        self,
        ir: SchedulerIRProtocol,
        passes: PassAdmin,
        kv: KVCacheManager,
        batching: BatchingMeter,
        *,
        now_ns: Callable[[], int],
        speculation: Speculation | None = None,
        foresee: Foresight | None = None,
    ) -> None:
        self._ir = ir
        self._foresee = foresee
        self._passes = passes
        self._kv = kv
        self._seats = kv.seats
        self._batching = batching
        self._now_ns = now_ns
        self.speculation = speculation
        self._sequences: dict[SequenceId, Sequence] = {}
        self._waiting = WaitingRows()
        self._running: list[Sequence] = []  # in order of admission, like `_running_seats`
        self._running_seats: Places = np.empty(0, np.intp)
        self._kept_columns: dict[str, Any] = {}  # gathered for the rows of these
        self._running_columns = RemainingColumns(
            kv.seats.schedule_columns.arrays,
            num_computed_tokens=kv.seats.num_computed,
            num_blocks=kv.seats.num_blocks,
            last_scheduled_step=kv.seats.last_step,
        )
        self._earliest_deadline_s = np.inf  # of live sequences, or of one that has ended since
        self.num_preemptions = 0
        self.decisions: Seq[Decision] = ()  # of passes, about the last step
        self._num_fetching = 0  # waiting sequences that the last plan admitted too early
        self._lacks_blocks = False  # the last plan stopped at a waiting sequence for lack of blocks
        self.log = DecisionLog(kv.seats, now_ns)

    @property
    def num_waiting(self) -> int:
        """Sequences that hold no blocks."""
        return len(self._waiting)

    @property
    def num_deferred(self) -> int:
        """Waiting sequences that the last step passed over: a pass deferred them, or KV is being fetched."""
        rows = {row for each in self.decisions if each.kind == "defer" for row in each.rows.tolist()}
        return min(self.num_waiting, len(rows) + self._num_fetching)

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._running)

    @property
    def sequence_ids(self) -> list[SequenceId]:
        """All sequences, waiting or running."""
        return list(self._sequences)

    def waiting_rows(self) -> RequestRows:
        """Return the sequences that wait, as passes see them; valid until one is added or removed."""
        return self._waiting.rows()

    @property
    def num_live_tokens(self) -> int:
        """Tokens of running sequences whose KV is stored."""
        return int(self._seats.num_committed[self._running_seats].sum())

    def read_predictions(self) -> None:
        """Read again what is predicted of the sequences that wait."""
        self._waiting.refresh()

    def __contains__(self, sequence_id: SequenceId) -> bool:
        return sequence_id in self._sequences

    def __getitem__(self, sequence_id: SequenceId) -> Sequence:
        return self._sequences[sequence_id]

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self._sequences[sequence.sequence_id] = sequence
        self._queue(sequence)
        if sequence.request.deadline_ns is not None:
            self._earliest_deadline_s = min(self._earliest_deadline_s, sequence.request.deadline_ns / 1e9)

    def probe(self, request: ScheduleRequest) -> PrefixHit:
        """Return what admitting a waiting request would reuse and take."""
        return self._kv.probe(self._sequences[SequenceId(request.request_id)])

    def _plan(self, waiting: RequestRows, running: RequestRows, available_blocks: int) -> SchedulePlan:
        """Have the IR decide, without passes that fail."""
        while True:
            try:
                return self._ir.schedule(
                    pending_requests=waiting, running_requests=running, available_memory=available_blocks
                )
            except PassError as error:
                if not self._passes.remove_failed(error):
                    raise

    def lengthen_steps(self, factor: float) -> None:
        """Let steps take so many times their target from now on."""
        self._ir.lengthen_steps(factor)

    def schedule(self, *, may_repeat: bool = True) -> PlannedStep | None:
        """Decide on a step and take the blocks it needs; None if there is nothing to compute.

        If it `may_repeat`, those that follow and are known to be the same are part of it.
        """
        available_blocks = self._kv.available_blocks
        running, waiting = self._running_rows(), self._waiting.rows()
        plan = self._plan(waiting, running, available_blocks)
        self.decisions = plan.decisions
        self._lacks_blocks = plan.deferred_reason == "blocks"
        self._num_fetching = 0
        self.log.planned(plan, self._running)
        if len(waiting):
            self._batching.measure(
                plan,
                waiting=waiting,
                running=running,
                available_blocks=available_blocks,
                num_blocks_for=self._kv.num_blocks_for,
            )
        is_all = plan.rows is running.positions
        served = self._running_seats if is_all else self._running_seats.take(plan.rows)
        admitted = [self._waiting[entry.row] for entry in plan.admitted]
        if plan.preempted:
            for row in sorted(plan.preempted, reverse=True):
                self._preempt(self._running[row], is_swapped=row in plan.swapped)
        planned = self._carry_out(plan, served, admitted)
        if planned is None and (len(served) or admitted) and not self._kv.num_fetches:
            # The eviction policy keeps what must go before anything can run; clearing asks no policy.
            self._kv.clear_cache()
            planned = self._carry_out(plan, served, admitted)
        if planned is None:
            return None
        if may_repeat and plan.is_steady and self._foresee is not None:
            planned = self._repeat(plan, planned, self._foresee)
        self._seats.last_step[planned.seats] = plan.step + planned.num_steps - 1
        if self._seats.scored:
            return self._limit_scored(planned)
        return planned if self.speculation is None else self.speculation.with_drafts(planned)

    def expired(self, now_ns: int) -> list[SequenceId]:
        """Return the sequences whose deadline has passed. One comparison until the earliest one has."""
        now_s = now_ns / 1e9
        if now_s <= self._earliest_deadline_s:
            return []
        waiting = self._waiting.rows().deadline
        running = self._seats.schedule_columns.arrays["deadline"][self._running_seats]
        late = [self._waiting[place].sequence_id for place in np.flatnonzero(waiting < now_s).tolist()]
        late += [self._running[place].sequence_id for place in np.flatnonzero(running < now_s).tolist()]
        left = np.concatenate((waiting[waiting >= now_s], running[running >= now_s]))
        self._earliest_deadline_s = left.min(initial=np.inf)
        return late

    def shut_out(self) -> Sequence | None:
        """Return the first waiting sequence that does not fit even though nothing runs.

        Passes may put another one before it, and the last plan may have lacked blocks for that.
        """
        if self._running:
            return None
        num_asked = len(self._waiting) if self._lacks_blocks else min(1, len(self._waiting))
        for place in range(num_asked):
            sequence = self._waiting[place]
            if self._kv.probe(sequence).num_blocks_needed > self._kv.available_blocks:
                return sequence
        return None

    def finish(self, sequence_id: SequenceId, status: RequestStatus) -> Sequence:
        """Free the blocks of a sequence and remove it. Raises UnknownRequestError if it is not live.

        If a module raises, the sequence has no blocks left but is still live; call again.
        """
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            raise UnknownRequestError(f"no live request has the id {sequence_id!r}")
        self.log.finished(sequence, status)
        if self.speculation is not None:
            self.speculation.departed(sequence, is_over=status in _COMPLETE)
        self._kv.release(sequence, is_sound=status is not RequestStatus.FINISHED_ERROR)
        if sequence.status is RequestStatus.RUNNING:
            self._stop_running(sequence)
        else:
            self._waiting.remove(sequence)
        del self._sequences[sequence_id]
        sequence.status = status
        return sequence

    def _running_rows(self) -> RequestRows:
        columns = self._running_columns
        columns["num_tokens"] = self._seats.num_schedulable
        return RequestRows(columns, self._running_seats, self._running_request, self._kept_columns)

    def _running_request(self, seat: int) -> ScheduleRequest:
        seats = self._seats
        return schedule_request(
            seats.sequences[seat],
            num_tokens=int(seats.num_schedulable[seat]),
            num_computed_tokens=int(seats.num_computed[seat]),
            num_blocks=int(seats.num_blocks[seat]),
            last_scheduled_step=int(seats.last_step[seat]),
        )

    def _carry_out(self, plan: SchedulePlan, served: Places, admitted: Seq[Sequence]) -> PlannedStep | None:
        """Take the blocks of a plan; sequences that get none are left out."""
        seats, num_new = served, plan.num_tokens
        rows = plan.num_new_blocks.nonzero()[0]
        if len(rows):
            growing = served.take(rows)
            num_tokens = self._seats.num_computed.take(growing) + num_new.take(rows)
            if without := self._kv.reserve(growing, num_tokens):
                for seat in growing[without].tolist():
                    self.log.without_blocks(Seat(seat))
                seats, num_new = np.delete(served, rows[without]), np.delete(num_new, rows[without])
        if plan.admitted:
            new = self._admit(plan, admitted)
            seats = np.concatenate((seats, np.array([seat for seat, _ in new], np.intp)))
            num_new = np.concatenate((num_new, np.array([number for _, number in new], np.int32)))
        return PlannedStep(seats=seats, num_new=num_new) if len(seats) else None

    def _repeat(self, plan: SchedulePlan, planned: PlannedStep, foresee: Foresight) -> PlannedStep:
        """Return a step with those after it that would be the same, as nothing begins, ends or is missing.

        As each step alone would, it takes blocks one step after the other, in the same order.
        """
        seats, table = planned.seats, self._seats
        if len(seats) < len(self._running) or self.speculation is not None:
            return planned
        if table.scored or table.structured or table.with_hidden:
            return planned
        num_tokens, num_computed = table.num_tokens.take(seats), table.num_computed.take(seats)
        num_steps = 1 + int((table.max_computed.take(seats) - num_tokens).min())
        if num_steps > 1:
            deadline_s = self._earliest_deadline_s
            num_steps = foresee(seats, num_computed, num_steps=num_steps, deadline_s=deadline_s)
        if num_steps > 1:
            num_steps = 1 + self._kv.reserve_steps(seats, num_computed + 1, num_steps - 1)
        if num_steps == 1:
            return planned
        self._ir.repeat(plan, num_steps - 1)
        self.log.step += num_steps - 1
        return PlannedStep(seats=seats, num_new=planned.num_new * num_steps, num_steps=num_steps)

    def _admit(self, plan: SchedulePlan, admitted: Seq[Sequence]) -> list[tuple[Seat, int]]:
        scheduled = []
        started: list[Sequence] = []
        now_ns = self._now_ns()
        try:
            for entry, sequence in zip(plan.admitted, admitted, strict=True):
                try:
                    if self._kv.is_fetching(sequence):
                        self.log.fetching(sequence)
                        self._num_fetching += 1
                        continue
                    self._kv.admit(sequence)
                except OutOfBlocksError:
                    self.log.lacked_blocks()
                    break
                started.append(sequence)
                if sequence.scheduled_ns is None:
                    sequence.scheduled_ns = now_ns
                seat = sequence.seat
                assert seat is not None
                self.log.admitted(sequence, entry)
                num_left = self._seats.num_tokens.item(seat) - self._seats.num_computed.item(seat)
                scheduled.append((seat, min(entry.num_tokens, num_left)))
        finally:  # if a module fails, what has blocks is known to run
            if started:
                self._start_running(started)
        return scheduled

    def _queue(self, sequence: Sequence) -> None:
        place = self._waiting.add(sequence)
        self.log.queued(sequence, place, len(self._waiting))

    def _start_running(self, started: Seq[Sequence]) -> None:
        self._waiting.remove(*started)
        for sequence in started:
            sequence.status = RequestStatus.RUNNING
            self._running.insert(place_of(sequence, self._running), sequence)
        if self._running[-len(started) :] == started:
            new = np.array([each.seat for each in started], np.intp)
            self._running_seats = np.concatenate((self._running_seats, new))
        else:
            self._running_seats = np.array([each.seat for each in self._running], np.intp)
        self._kept_columns = {}

    def _stop_running(self, sequence: Sequence) -> None:
        place = self._running.index(sequence)
        del self._running[place]
        self._running_seats = np.delete(self._running_seats, place)
        self._kept_columns = {}

    def _preempt(self, sequence: Sequence, *, is_swapped: bool) -> None:
        is_swapped = is_swapped and self._kv.swap_out(sequence)
        if self.speculation is not None:
            self.speculation.departed(sequence, is_over=False)
        self._kv.release(sequence)
        self._stop_running(sequence)
        sequence.status = RequestStatus.SWAPPED if is_swapped else RequestStatus.WAITING
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._queue(sequence)

    def _limit_scored(self, planned: PlannedStep) -> PlannedStep | None:
        """Cut sequences short if the step would score too many positions; the rest waits for a later step."""
        left, num_new = MAX_SCORED_POSITIONS, planned.num_new.copy()
        for row, seat in enumerate(planned.seats.tolist()):
            if seat not in self._seats.scored:
                continue
            sequence, start = self._seats.sequences[seat], int(self._seats.num_computed[seat])
            begin = max(start, sequence.num_scored)
            num_scored = min(start + int(num_new[row]), sequence.num_to_score) - begin
            if num_scored > left:
                num_new[row] = begin + left - start
            left -= max(0, min(num_scored, left))
        is_kept = num_new > 0
        return PlannedStep(seats=planned.seats[is_kept], num_new=num_new[is_kept]) if is_kept.any() else None
