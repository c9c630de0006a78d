"""What the scheduler decided about each sequence, when and why, as far as memory for it goes.

A change is an event of its sequence. A step that does not admit somebody is not: those who wait for the same
reason share one `WaitRange`, which the next step extends if nothing has changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from sagellm.core import Decision, RequestId, SchedulePlan, SequenceId
from sagellm.core.protocols.scheduler_ir import Admission, DeferredReason
from sagellm.core.protocols.step import Seat
from sagellm.engines.engine_core.decision_events import (
    Admitted,
    CappedBy,
    Computed,
    Finished,
    Placed,
    Preempted,
    Queued,
    Waited,
    WaitReason,
)
from sagellm.engines.engine_core.seats import Seats
from sagellm.engines.engine_core.sequence import RequestStatus, Sequence

MAX_FINISHED = 2048
"""Sequences that are remembered after their end."""

MAX_EVENTS = 48
"""Events of one sequence; if there are more, some in the middle are forgotten."""

MAX_FINISHED_EVENTS = 32_768
"""Events of all finished sequences, of about 150 bytes each."""

MAX_RANGE_BYTES = 4 << 20
"""Bytes of all ranges, with the keys that passes deferred."""

_RANGE_BYTES = 256
_MANY_RANGES = 256

_LIMITS = {"tokens": "max_num_batched_tokens", "seats": "max_num_seqs", "blocks": "available_memory"}
"""What a step ran out of → the limit that a pass may have lowered."""


@dataclass(slots=True, kw_only=True, eq=False)
class WaitRange:
    """Steps in a row, [first_step, last_step], that did not admit sequences for one reason."""

    reason: WaitReason
    made_by: str
    detail: str
    first_step: int
    last_step: int
    begun_ns: int
    ended_ns: int  # when the step after the last one was planned
    least: int | None = None
    most: int | None = None
    keys: npt.NDArray[np.int64] | None = None  # of the sequences; None: all whom no pass deferred

    def include(self, value: int) -> None:
        """Widen the range of values that the limit had."""
        self.least = value if self.least is None else min(self.least, value)
        self.most = value if self.most is None else max(self.most, value)


class Facts(NamedTuple):
    """What stays known of a sequence after its end; neither prompt nor output."""

    sequence_id: SequenceId
    request_id: RequestId
    key: int
    tenant: str
    priority: int
    arrival_ns: int
    num_prompt_tokens: int
    max_tokens: int
    num_preemptions: int


@dataclass(slots=True, eq=False)
class Story:
    """What happened to one sequence."""

    sequence: Sequence | None  # None after its end
    number: int  # in the order of arrival
    state: Literal["waiting", "running", "finished"] = "waiting"
    events: list[Any] = field(default_factory=list)
    num_forgotten: int = 0  # events
    num_computed: int = 0  # tokens, while its prompt is computed
    num_wanted: int = 0
    counted_step: int = -1
    ended: Facts | None = None

    @property
    def facts(self) -> Facts:
        """What is known of the sequence besides events."""
        sequence = self.sequence
        if sequence is None:
            assert self.ended is not None
            return self.ended
        request = sequence.request
        return Facts(
            sequence.sequence_id,
            request.request_id,
            sequence.key,
            request.tenant.name,
            request.priority,
            request.arrival_ns,
            len(request.token_ids),
            request.max_tokens,
            sequence.num_preemptions,
        )

    def add(self, event: Any) -> None:
        """Append an event."""
        self.events.append(event)
        if len(self.events) > MAX_EVENTS:
            del self.events[MAX_EVENTS // 2]
            self.num_forgotten += 1


class DecisionLog:
    """Records what the scheduler decides; `explanation` tells it.

    A step in which nothing changes costs a few comparisons, however many sequences wait, and one more
    comparison of rows for each reason for which passes defer some.
    """

    def __init__(self, seats: Seats, now_ns: Callable[[], int]) -> None:
        self._seats = seats
        self._now_ns = now_ns
        self._live: dict[SequenceId, Story] = {}
        self._finished: deque[Story] = deque()
        self._num_finished_events = 0
        self._num_stories = 0
        self._unplaced: list[Story] = []  # queued since passes last ordered those who wait
        self._prefilling: dict[SequenceId, Story] = {}
        self._ranges: deque[WaitRange] = deque()
        self._range_bytes = 0
        self._many_ranges = _MANY_RANGES  # when to look for those that explain nothing any more
        self._main: WaitRange | None = None  # of the last step, like all that follows
        self._deferred: list[WaitRange] = []
        self._step = -1
        self._begun_ns = 0
        self._decisions: Seq[Decision] = ()
        self._caps: list[tuple[Decision, set[int]]] = []  # and the keys of the sequences that each is for
        self._places: dict[str, npt.NDArray[np.int32]] = {}  # by pass: the place of each row
        self._without_blocks: set[int] = set()  # seats
        self.forgotten_ns = 0  # ranges that ended before are forgotten
        self.num_wasted_tokens = 0  # whose KV was lost by preemptions and not found in the cache again

    def queued(self, sequence: Sequence, place: int, num_waiting: int) -> None:
        """Record that a sequence waits, at a place that counts from 0."""
        story = self._live.get(sequence.sequence_id)
        if story is None:
            self._num_stories += 1
            self._live[sequence.sequence_id] = story = Story(sequence, self._num_stories)
        story.state = "waiting"
        at_ns = self._now_ns() - sequence.request.arrival_ns
        story.add(Queued(at_ns, self._step, place + 1, num_waiting))
        self._unplaced.append(story)

    def planned(self, plan: SchedulePlan, running: Seq[Sequence]) -> None:
        """Record what a plan says of waiting and preempted sequences, before it is carried out."""
        now_ns = self._now_ns()
        if self._prefilling:
            self._count_parts()
        decisions = plan.decisions
        self._decisions, self._step, self._begun_ns = decisions, plan.step, now_ns
        if self._caps:
            self._caps = []
        if self._places:
            self._places = {}
        lowered: Decision | None = None
        if decisions:
            lowered = self._read(plan, now_ns)
        else:
            if self._deferred:
                self._defer(plan, now_ns)
            if plan.admitted:
                self._unplaced.clear()
        if plan.deferred_reason is not None or self._main is not None:
            self._extend(plan.deferred_reason, lowered, now_ns)
        if plan.preempted:
            self._preempt(plan, running)

    def lacked_blocks(self) -> None:
        """Record that the step's other admissions failed for lack of blocks, against the plan."""
        main = self._main
        if main is not None:
            if main.reason == "blocks":
                return
            main.last_step -= 1
            if main.last_step < main.first_step and self._ranges[-1] is main:
                self._ranges.pop()
                self._range_bytes -= _RANGE_BYTES
        self._main = self._begin("blocks", "", self._begun_ns)

    def fetching(self, sequence: Sequence) -> None:
        """Record that a sequence is not admitted in this step because its KV is read from a tier."""
        story = self._live[sequence.sequence_id]
        at_ns, last = self._begun_ns - sequence.request.arrival_ns, story.events[-1]
        if not isinstance(last, Waited):
            last = Waited(at_ns=at_ns, duration_ns=0, reason="fetch", first_step=self._step)
            story.add(last)
        last.duration_ns = at_ns - last.at_ns
        if last.last_step != self._step:  # a step may try twice
            last.last_step = self._step
            last.num_steps += 1

    def without_blocks(self, seat: Seat) -> None:
        """Record that a running sequence sits the step out for lack of blocks, against the plan."""
        self._without_blocks.add(seat)

    def admitted(self, sequence: Sequence, entry: Admission) -> None:
        """Record that a waiting sequence has got its seat and blocks."""
        story, seat = self._live[sequence.sequence_id], sequence.seat
        assert seat is not None
        num_tokens, num_cached = self._seats.num_tokens.item(seat), self._seats.num_computed.item(seat)
        if sequence.num_preemptions:
            self._settle(story, num_cached)
        story.add(
            Admitted(
                self._begun_ns - sequence.request.arrival_ns,
                self._step,
                entry.row + 1,
                {name: int(places[entry.row]) for name, places in self._places.items()},
                num_tokens,
                num_cached,
            )
        )
        story.state = "running"
        story.num_computed, story.num_wanted = num_cached, num_tokens
        self._prefilling[sequence.sequence_id] = story

    def finished(self, sequence: Sequence, status: RequestStatus) -> None:
        """Record that a sequence ends, before its blocks are freed. Idempotent."""
        story = self._live.pop(sequence.sequence_id, None)
        if story is None:
            return
        if sequence.sequence_id in self._prefilling:
            self._count_part(story)
            self._prefilling.pop(sequence.sequence_id, None)
        if story.state == "waiting":
            if story in self._unplaced:
                self._unplaced.remove(story)
            self._settle(story, 0)
        story.add(
            Finished(self._now_ns() - sequence.request.arrival_ns, status.value, sequence.num_output_tokens)
        )
        story.state = "finished"
        story.ended, story.sequence = story.facts, None  # a prompt may be long
        self._finished.append(story)
        self._num_finished_events += len(story.events)
        while len(self._finished) > MAX_FINISHED or self._num_finished_events > MAX_FINISHED_EVENTS:
            self._num_finished_events -= len(self._finished.popleft().events)

    def stories(self) -> list[Story]:
        """Return what is remembered, in the order of arrival."""
        if self._prefilling:
            self._count_parts()
        return sorted((*self._finished, *self._live.values()), key=lambda story: story.number)

    def ranges(self, key: int) -> tuple[list[WaitRange], list[WaitRange]]:
        """Return the ranges in which passes deferred a sequence, and those of all others, by time."""
        now_ns = self._now_ns()
        for each in (*self._deferred, *([] if self._main is None else [self._main])):
            each.ended_ns = now_ns  # until the next step says otherwise
        own = [each for each in self._ranges if each.keys is not None and key in each.keys]
        return own, [each for each in self._ranges if each.keys is None]

    def _read(self, plan: SchedulePlan, now_ns: int) -> Decision | None:
        """Record orders and deferrals; return the decision that lowered what the step ran out of."""
        lowered: Decision | None = None
        deferring: list[Decision] = []
        orders: list[Decision] = []
        limit = _LIMITS.get(plan.deferred_reason or "")
        for decision in plan.decisions:
            if decision.kind == "lower":
                lowered = decision if decision.target == limit else lowered
            elif decision.kind == "cap":
                rows = plan.pending if decision.target == "pending" else plan.running
                self._caps.append((decision, set(rows.key[decision.rows].tolist())))
            elif decision.kind == "defer":
                deferring.append(decision)
            elif decision.kind == "order" and decision.target == "pending":
                orders.append(decision)
        if deferring or self._deferred:
            self._defer(plan, now_ns, deferring)
        if plan.admitted or (orders and self._unplaced):
            for decision in orders:
                places = np.empty(len(decision.rows), np.int32)
                places[decision.rows] = np.arange(1, len(places) + 1, dtype=np.int32)
                self._places[decision.made_by] = places
            self._place(plan)
        return lowered

    def _extend(self, reason: DeferredReason | None, lowered: Decision | None, now_ns: int) -> None:
        """Extend the range of the last step, or begin another."""
        main, made_by = self._main, "" if lowered is None else lowered.made_by
        if main is not None:
            main.ended_ns = now_ns
        if main is not None and main.reason == reason and main.made_by == made_by:
            main.last_step = self._step
        elif reason is None or reason == "pass":
            self._main = None
            return
        else:
            self._main = main = self._begin(reason, made_by, now_ns)
        if lowered is not None:
            main.include(int(lowered.value or 0))

    def _defer(self, plan: SchedulePlan, now_ns: int, deferring: Seq[Decision] = ()) -> None:
        """Extend the ranges of the same pass, reason and rows, and begin others."""
        before, self._deferred = self._deferred, []
        for each in before:
            each.ended_ns = now_ns
        for decision in deferring:
            keys, detail = plan.pending.key[decision.rows], str(decision.value)
            for each in before:
                is_same = (each.made_by, each.detail) == (decision.made_by, detail)
                if is_same and each.keys is not None and np.array_equal(each.keys, keys):
                    each.last_step = plan.step
                    break
            else:
                each = self._begin("pass", decision.made_by, now_ns, detail, keys)
            self._deferred.append(each)

    def _begin(
        self,
        reason: WaitReason,
        made_by: str,
        now_ns: int,
        detail: str = "",
        keys: npt.NDArray[np.int64] | None = None,
    ) -> WaitRange:
        """Append a range that begins with this step; forget the oldest ones if there are too many."""
        begun = WaitRange(
            reason=reason,
            made_by=made_by,
            detail=detail,
            first_step=self._step,
            last_step=self._step,
            begun_ns=now_ns,
            ended_ns=now_ns,
            keys=keys,
        )
        if len(self._ranges) > self._many_ranges:
            self._drop_ranges_before_all_stories()
        self._ranges.append(begun)
        self._range_bytes += _bytes_of(begun)
        while self._range_bytes > MAX_RANGE_BYTES and len(self._ranges) > 1:
            self.forgotten_ns = max(self.forgotten_ns, self._drop_oldest_range().ended_ns)
        return begun

    def _drop_ranges_before_all_stories(self) -> None:
        """Drop the oldest ranges, up to the first that a remembered sequence may have waited in."""
        open_ranges = (self._main, *self._deferred)
        arrivals_ns = (each.facts.arrival_ns for each in (*self._finished, *self._live.values()))
        first_ns = min(arrivals_ns, default=self._begun_ns)
        while self._ranges and self._ranges[0].ended_ns < first_ns and self._ranges[0] not in open_ranges:
            self._drop_oldest_range()
        self._many_ranges = max(_MANY_RANGES, 2 * len(self._ranges))

    def _drop_oldest_range(self) -> WaitRange:
        oldest = self._ranges.popleft()
        self._range_bytes -= _bytes_of(oldest)
        return oldest

    def _place(self, plan: SchedulePlan) -> None:
        """Record where passes have put those whom they order for the first time."""
        new, self._unplaced = self._unplaced, []
        if not self._places or not new:
            return  # nobody ordered them, though some are admitted
        keys = plan.pending.key
        by_key = np.argsort(keys)
        wanted = np.array([story.facts.key for story in new])
        rows = by_key[keys.searchsorted(wanted, sorter=by_key)]
        for story, row in zip(new, rows.tolist(), strict=True):
            at_ns = self._begun_ns - story.facts.arrival_ns
            places = {name: int(each[row]) for name, each in self._places.items()}
            story.add(Placed(at_ns, self._step, places))

    def _preempt(self, plan: SchedulePlan, running: Seq[Sequence]) -> None:
        for index, row in enumerate(plan.preempted):
            sequence = running[row]
            self._prefilling.pop(sequence.sequence_id, None)
            cause = plan.preempted_for[index] if index < len(plan.preempted_for) else -1
            made_by = ""
            for decision in plan.decisions:
                if cause < 0 and decision.kind == "preempt" and row in decision.rows:
                    made_by = decision.made_by
            story = self._live.get(sequence.sequence_id)
            if story is None:  # it has ended, but a module failed to take its blocks back
                continue
            story.add(
                Preempted(
                    at_ns=self._begun_ns - sequence.request.arrival_ns,
                    step=self._step,
                    preempted_for=None if cause < 0 else running[cause].sequence_id,
                    made_by=made_by,
                    way="swap" if row in plan.swapped else "recompute",
                    num_computed_tokens=sequence.num_computed_tokens,
                )
            )

    def _settle(self, story: Story, num_cached: int) -> None:
        """Record how many tokens the last preemption wasted, if that is not known yet."""
        for event in reversed(story.events):
            if isinstance(event, Preempted):
                if event.num_wasted_tokens is None:
                    event.num_wasted_tokens = max(0, event.num_computed_tokens - num_cached)
                    self.num_wasted_tokens += event.num_wasted_tokens
                return

    def _count_parts(self) -> None:
        for story in list(self._prefilling.values()):
            self._count_part(story)
        self._without_blocks.clear()

    def _count_part(self, story: Story) -> None:
        """Record how much of a prompt the last step computed, and what ended that part."""
        sequence = story.sequence
        seat = None if sequence is None else sequence.seat
        if sequence is None or seat is None:
            return  # it left its seat between two steps
        done = int(self._seats.num_computed[seat])
        num_tokens, story.num_computed = done - story.num_computed, done
        is_over = done >= story.num_wanted
        if is_over:
            del self._prefilling[sequence.sequence_id]
        if num_tokens < 0 or (num_tokens == 0 and story.counted_step == self._step):
            return  # the step failed, or has been counted
        story.counted_step = self._step
        capped_by, made_by, value = (None, "", None) if is_over else self._cap_of(sequence, num_tokens)
        last = story.events[-1]
        is_same = isinstance(last, Computed) and (last.capped_by, last.made_by) == (capped_by, made_by)
        if not is_same:
            at_ns = self._begun_ns - sequence.request.arrival_ns
            last = Computed(
                at_ns=at_ns, first_step=self._step, last_step=-1, num_steps=0, num_tokens=0, made_by=made_by
            )
            last.capped_by = capped_by
            story.add(last)
        last.num_steps += last.last_step != self._step
        last.last_step = self._step
        last.num_tokens += num_tokens
        if value is not None:
            last.least = value if last.least is None else min(last.least, value)
            last.most = value if last.most is None else max(last.most, value)

    def _cap_of(self, sequence: Sequence, num_tokens: int) -> tuple[CappedBy, str, int | None]:
        """Return what ended a part of a prompt, the pass that decided so, and its value."""
        if sequence.seat in self._without_blocks:
            return "blocks", "", None
        for decision, keys in self._caps:
            if decision.value == num_tokens and sequence.key in keys:
                return "cap", decision.made_by, num_tokens
        lowered: tuple[CappedBy, str, int | None] = ("tokens", "", None)
        for decision in self._decisions:
            if (decision.kind, decision.target) == ("lower", "max_num_batched_tokens"):
                lowered = ("tokens", decision.made_by, int(decision.value or 0))
        return ("scored", "", None) if sequence.seat in self._seats.scored else lowered


def _bytes_of(each: WaitRange) -> int:
    return _RANGE_BYTES + (0 if each.keys is None else each.keys.nbytes)
