"""What the scheduler decided about each sequence, when and why, as far as memory for it goes.

What happens to a sequence is an event of its own. Steps that do not admit somebody are not: those who wait
for the same reason share one `Cause`, and a `Change` of causes holds until the next one. `explanation` makes
waits of both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from sagellm.core import Decision, RequestId, SchedulePlan, SequenceId
from sagellm.core.protocols.scheduler_ir import Admission
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

MAX_CHANGE_BYTES = 4 << 20
"""Bytes of all changes, with the keys that passes deferred."""

_CHANGE_BYTES = 256

_LIMITS = {"tokens": "max_num_batched_tokens", "seats": "max_num_seqs", "blocks": "available_memory"}
"""What a step ran out of → the limit that a pass may have lowered."""


@dataclass(slots=True, eq=False)
class Cause:
    """Why steps do not admit some sequences."""

    reason: WaitReason
    made_by: str  # the pass that defers them, or lowered what the steps ran out of
    detail: str = ""
    keys: npt.NDArray[np.int64] | None = None  # of the sequences; None: all whom no pass deferred
    least: int | None = None  # values to which the pass lowered it
    most: int | None = None

    def include(self, value: int) -> None:
        """Widen the range of values that the limit had."""
        self.least = value if self.least is None else min(self.least, value)
        self.most = value if self.most is None else max(self.most, value)


class Change(NamedTuple):
    """What keeps sequences waiting, from a step to the next change."""

    step: int
    at_ns: int  # when the step was planned
    causes: list[Cause]

    @property
    def num_bytes(self) -> int:
        """About what it takes."""
        return _CHANGE_BYTES + sum(0 if each.keys is None else each.keys.nbytes for each in self.causes)


class Facts(NamedTuple):
    """What is known of a sequence besides events; neither prompt nor output."""

    sequence_id: SequenceId
    request_id: RequestId
    key: int
    tenant: str
    priority: int
    arrival_ns: int
    num_prompt_tokens: int
    max_tokens: int


@dataclass(slots=True, eq=False)
class Story:
    """What happened to one sequence."""

    facts: Facts
    number: int  # in the order of arrival
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    events: list[Any] = field(default_factory=list)
    num_forgotten: int = 0  # events
    num_computed: int = 0  # tokens, while its prompt is computed
    num_wanted: int = 0
    counted_step: int = -1
    unsettled: Preempted | None = None  # it has not been admitted since

    @property
    def state(self) -> Literal["waiting", "running", "finished"]:
        """Where the last of its events left it."""
        for event in reversed(self.events):
            if isinstance(event, Finished):
                return "finished"
            if isinstance(event, Admitted | Computed):
                return "running"
            if isinstance(event, Queued):
                break
        return "waiting"

    def add(self, event: Any) -> None:
        """Append an event."""
        self.events.append(event)
        if len(self.events) > MAX_EVENTS:
            del self.events[MAX_EVENTS // 2]
            self.num_forgotten += 1

    def settle(self, num_cached: int) -> None:
        """Record how many tokens the last preemption wasted, if that is not known yet."""
        if self.unsettled is not None:
            num_computed = self.unsettled.num_computed_tokens
            self.unsettled.num_wasted_tokens = max(0, num_computed - num_cached)
            self.unsettled = None


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
        self._prefills: dict[SequenceId, tuple[Sequence, Story]] = {}
        self.changes = deque([Change(-1, 0, [])])  # the last one still holds
        self._change_bytes = _CHANGE_BYTES
        self.forgotten_ns = 0  # changes that held until then are forgotten
        self.step = -1  # the last one, like all that follows
        self._main: Cause | None = None
        self._deferrals: list[Cause] = []
        self._begun_ns = 0
        self._decisions: Seq[Decision] = ()
        self._caps: list[tuple[Decision, npt.NDArray[np.int64]]] = []  # and the keys of all rows
        self._places: dict[str, npt.NDArray[np.int32]] = {}  # by pass: the place of each row
        self._without_blocks: set[int] = set()  # seats

    def preparing(self, sequence: Sequence) -> None:
        """Record that a sequence is queued only when its grammar is compiled."""
        story = self._story(sequence)
        at_ns = self._now_ns() - story.facts.arrival_ns
        story.add(Waited(at_ns=at_ns, duration_ns=0, reason="grammar"))

    def queued(self, sequence: Sequence, place: int, num_waiting: int) -> None:
        """Record that a sequence waits, at a place that counts from 0."""
        story = self._live.get(sequence.sequence_id) or self._story(sequence)
        at_ns = self._now_ns() - story.facts.arrival_ns
        story.add(Queued(at_ns, self.step, place + 1, num_waiting))
        self._unplaced.append(story)

    def planned(self, plan: SchedulePlan, running: Seq[Sequence]) -> None:
        """Record what a plan says of waiting and preempted sequences, before it is carried out."""
        if self._prefills:
            self._count_parts()
        self._decisions, self.step, self._begun_ns = plan.decisions, plan.step, self._now_ns()
        self._caps, self._places = [], {}
        lowered: Decision | None = None
        deferrals: list[Cause] = []
        if plan.decisions:
            lowered = self._read(plan, deferrals)
        elif plan.admitted:
            self._unplaced.clear()
        reason, main = plan.deferred_reason, self._main
        if reason is None or reason == "pass":
            main = None
        else:
            made_by = "" if lowered is None else lowered.made_by
            if main is None or main.reason != reason or main.made_by != made_by:
                main = Cause(reason, made_by)
            if lowered is not None:
                main.include(int(lowered.value or 0))
        if main is not self._main or deferrals != self._deferrals:
            self._change(main, deferrals)
        if plan.preempted:
            self._preempt(plan, running)

    def lacked_blocks(self) -> None:
        """Record that the step's other admissions failed for lack of blocks, against the plan."""
        if self._main is None or self._main.reason != "blocks":
            self._change(Cause("blocks", ""), self._deferrals)

    def fetching(self, sequence: Sequence) -> None:
        """Record that a sequence is not admitted in this step because its KV is read from a tier."""
        story = self._live[sequence.sequence_id]
        at_ns, last = self._begun_ns - sequence.request.arrival_ns, story.events[-1]
        if not isinstance(last, Waited):
            last = Waited(at_ns=at_ns, duration_ns=0, reason="fetch", first_step=self.step)
            story.add(last)
        last.duration_ns = at_ns - last.at_ns
        if last.last_step != self.step:  # a step may try twice
            last.last_step = self.step
            last.num_steps += 1

    def without_blocks(self, seat: Seat) -> None:
        """Record that a running sequence sits the step out for lack of blocks, against the plan."""
        self._without_blocks.add(seat)

    def admitted(self, sequence: Sequence, entry: Admission) -> None:
        """Record that a waiting sequence has got its seat and blocks."""
        story, seat = self._live[sequence.sequence_id], sequence.seat
        assert seat is not None
        num_tokens, num_cached = self._seats.num_tokens.item(seat), self._seats.num_computed.item(seat)
        story.settle(num_cached)
        story.add(
            Admitted(
                self._begun_ns - sequence.request.arrival_ns,
                self.step,
                entry.row + 1,
                {name: int(places[entry.row]) for name, places in self._places.items()},
                num_tokens,
                num_cached,
            )
        )
        story.num_computed, story.num_wanted = num_cached, num_tokens
        self._prefills[sequence.sequence_id] = sequence, story

    def finished(self, sequence: Sequence, status: RequestStatus) -> None:
        """Record that a sequence ends, before its blocks are freed. Idempotent."""
        story = self._live.pop(sequence.sequence_id, None)
        if story is None:
            return
        if (prefill := self._prefills.get(sequence.sequence_id)) is not None:
            self._count_part(*prefill)
            self._prefills.pop(sequence.sequence_id, None)
        if sequence.seat is None and story in self._unplaced:
            self._unplaced.remove(story)
        story.settle(0)
        at_ns = self._now_ns() - story.facts.arrival_ns
        story.add(Finished(at_ns, status.value, sequence.num_output_tokens))
        self._finished.append(story)
        self._num_finished_events += len(story.events)
        while len(self._finished) > MAX_FINISHED or self._num_finished_events > MAX_FINISHED_EVENTS:
            self._num_finished_events -= len(self._finished.popleft().events)

    def drafted(self, sequence_id: SequenceId, num_tokens: int, num_accepted: int) -> None:
        """Count what became of a sequence's draft."""
        if (story := self._live.get(sequence_id)) is not None:
            story.num_draft_tokens += num_tokens
            story.num_accepted_tokens += num_accepted

    def stories(self) -> list[Story]:
        """Return what is remembered, in the order of arrival."""
        if self._prefills:
            self._count_parts()
        return sorted((*self._finished, *self._live.values()), key=lambda story: story.number)

    def _story(self, sequence: Sequence) -> Story:
        """Begin the story of a sequence."""
        self._num_stories += 1
        self._live[sequence.sequence_id] = story = Story(_facts_of(sequence), self._num_stories)
        return story

    def _read(self, plan: SchedulePlan, deferrals: list[Cause]) -> Decision | None:
        """Record orders and caps, and add deferrals; return what lowered the limit that the step reached."""
        lowered: Decision | None = None
        orders: list[Decision] = []
        limit = _LIMITS.get(plan.deferred_reason or "")
        for decision in plan.decisions:
            if decision.kind == "lower":
                lowered = decision if decision.target == limit else lowered
            elif decision.kind in ("cap", "yield"):
                rows = plan.pending if decision.target == "pending" else plan.running
                self._caps.append((decision, rows.key))
            elif decision.kind == "defer":
                keys = plan.pending.key[decision.rows]
                deferrals.append(self._deferral(decision.made_by, str(decision.value), keys))
            elif decision.kind == "order" and decision.target == "pending":
                orders.append(decision)
        if plan.admitted or (orders and self._unplaced):
            for decision in orders:
                places = np.empty(len(decision.rows), np.int32)
                places[decision.rows] = np.arange(1, len(places) + 1, dtype=np.int32)
                self._places[decision.made_by] = places
            self._place(plan)
        return lowered

    def _deferral(self, made_by: str, detail: str, keys: npt.NDArray[np.int64]) -> Cause:
        """Return the deferral of the last step if it is the same, else a new one."""
        for each in self._deferrals:
            is_same = (each.made_by, each.detail) == (made_by, detail)
            if is_same and each.keys is not None and np.array_equal(each.keys, keys):
                return each
        return Cause("pass", made_by, detail, keys)

    def _change(self, main: Cause | None, deferrals: list[Cause]) -> None:
        """Append a change that holds from this step on; forget the oldest ones if there are too many."""
        self._main, self._deferrals = main, deferrals
        causes = deferrals if main is None else [*deferrals, main]
        changes = self.changes
        changes.append(Change(self.step, self._begun_ns, causes))
        self._change_bytes += changes[-1].num_bytes
        while self._change_bytes > MAX_CHANGE_BYTES and len(changes) > 1:
            oldest = changes.popleft()
            self._change_bytes -= oldest.num_bytes
            if oldest.causes:
                self.forgotten_ns = changes[0].at_ns

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
            story.add(Placed(at_ns, self.step, places))

    def _preempt(self, plan: SchedulePlan, running: Seq[Sequence]) -> None:
        for index, row in enumerate(plan.preempted):
            sequence = running[row]
            self._prefills.pop(sequence.sequence_id, None)
            cause = plan.preempted_for[index] if index < len(plan.preempted_for) else -1
            made_by = ""
            for decision in plan.decisions:
                if cause < 0 and decision.kind == "preempt" and row in decision.rows:
                    made_by = decision.made_by
            story = self._live.get(sequence.sequence_id)
            if story is None:  # it has ended, but a module failed to take its blocks back
                continue
            story.num_preemptions += 1
            story.unsettled = Preempted(
                at_ns=self._begun_ns - sequence.request.arrival_ns,
                step=self.step,
                preempted_for=None if cause < 0 else running[cause].sequence_id,
                made_by=made_by,
                way="swap" if row in plan.swapped else "recompute",
                num_computed_tokens=sequence.num_computed_tokens,
            )
            story.add(story.unsettled)

    def _count_parts(self) -> None:
        for prefill in list(self._prefills.values()):
            self._count_part(*prefill)
        self._without_blocks.clear()

    def _count_part(self, sequence: Sequence, story: Story) -> None:
        """Record how much of a prompt the last step computed, and what ended that part."""
        seat = sequence.seat
        if seat is None:
            return  # it left its seat between two steps
        done = int(self._seats.num_computed[seat])
        num_tokens, story.num_computed = done - story.num_computed, done
        is_over = done >= story.num_wanted
        if is_over:
            del self._prefills[sequence.sequence_id]
        if num_tokens < 0 or (num_tokens == 0 and story.counted_step == self.step):
            return  # the step failed, or has been counted
        story.counted_step = self.step
        capped_by, made_by, value = (None, "", None) if is_over else self._cap_of(sequence, num_tokens)
        last = story.events[-1]
        is_same = isinstance(last, Computed) and (last.capped_by, last.made_by) == (capped_by, made_by)
        if not is_same:
            at_ns = self._begun_ns - sequence.request.arrival_ns
            last = Computed(
                at_ns=at_ns, first_step=self.step, last_step=-1, num_steps=0, num_tokens=0, made_by=made_by
            )
            last.capped_by = capped_by
            story.add(last)
        last.num_steps += last.last_step != self.step
        last.last_step = self.step
        last.num_tokens += num_tokens
        if value is not None:
            last.least = value if last.least is None else min(last.least, value)
            last.most = value if last.most is None else max(last.most, value)

    def _cap_of(self, sequence: Sequence, num_tokens: int) -> tuple[CappedBy, str, int | None]:
        """Return what ended a part of a prompt, the pass that decided so, and its value."""
        if sequence.seat in self._without_blocks:
            return "blocks", "", None
        for decision, keys in self._caps:
            if decision.value == num_tokens and sequence.key in keys[decision.rows]:
                return "cap", decision.made_by, num_tokens
        lowered: tuple[CappedBy, str, int | None] = ("tokens", "", None)
        for decision in self._decisions:
            if (decision.kind, decision.target) == ("lower", "max_num_batched_tokens"):
                lowered = ("tokens", decision.made_by, int(decision.value or 0))
        return ("scored", "", None) if sequence.seat in self._seats.scored else lowered


def _facts_of(sequence: Sequence) -> Facts:
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
    )
