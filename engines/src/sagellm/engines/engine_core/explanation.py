"""Explains a request from the decision log: what happened to it when, what it waited for, what was wasted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence as Seq
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from sagellm.core import SageLLMError
from sagellm.engines.engine_core.core import EngineCore
from sagellm.engines.engine_core.decision_events import Admitted, Event, Finished, Preempted, Queued, Waited
from sagellm.engines.engine_core.decision_log import Cause, Change, DecisionLog, Story
from sagellm.engines.engine_core.kv_admin import CacheAdmin
from sagellm.engines.engine_core.request_log import find_id

if TYPE_CHECKING:
    from sagellm.engines.engine_core.policies import PolicyChange

MAX_WAITS = 8
"""Ranges between two other events; more are joined by reason."""

MAX_LISTED = 10
"""Ids of other sequences in one list."""


@dataclass(frozen=True, kw_only=True)
class SequenceExplanation:
    """One continuation of a request. Lists of other sequences have their first 10 ids."""

    sequence_id: str
    state: Literal["waiting", "running", "finished"]
    events: tuple[Event, ...]  # in order; waits are cut at other events
    num_forgotten_events: int
    waited_ns: dict[str, int]  # by reason; for a pass, its name and words
    num_overtaken: int  # sequences behind it, by priority and arrival, admitted while it waited
    overtaken_by: tuple[str, ...]
    num_preempted_for_it: int
    preempted_for_it: tuple[str, ...]
    num_preemptions: int
    num_wasted_tokens: int  # whose KV its preemptions lost
    num_draft_tokens: int  # that were verified
    num_accepted_tokens: int  # of those


@dataclass(frozen=True, kw_only=True)
class ExplainedChange:
    """A policy that was switched while a request was there; `at_ns` is since its arrival."""

    at_ns: int
    kind: str
    before: str
    after: str
    made_by: str
    why: str


@dataclass(frozen=True, kw_only=True)
class RequestExplanation:
    """What happened to a request. `prefix` is what `CacheAdmin.why` says, None if that is not known.

    `changes` are the switches of policies while it was there.
    """

    request_id: str
    tenant: str
    priority: int
    num_prompt_tokens: int
    max_tokens: int
    age_ns: int  # since its arrival
    sequences: tuple[SequenceExplanation, ...]
    prefix: dict[str, Any] | None
    changes: tuple[ExplainedChange, ...] = ()


class Explainer:
    """Answers for one engine, between two steps."""

    def __init__(
        self, core: EngineCore, changes: Callable[[int, int], Seq[PolicyChange]] = lambda begin, end: ()
    ) -> None:
        """`changes` returns the switches of policies in an interval."""
        self._changes = changes
        self._log = core.scheduler.log
        self._clock = core.parts.runtime.clock
        self._cache = CacheAdmin(core.kv, self._clock)

    def explain(self, request: str | None = None) -> RequestExplanation:
        """Explain a request by its id or a unique prefix of it, by default the latest.

        O(what the log holds). Raises UnknownRequestError, which says what there is.
        """
        stories = self._log.stories()
        ids = [story.facts.request_id for story in stories]
        request_id = find_id(request, ids, if_empty="no request has arrived yet")
        own = [story for story in stories if story.facts.request_id == request_id]
        asked = own[-1].facts  # an id may come again once its request has ended
        own = [story for story in own if story.facts.arrival_ns == asked.arrival_ns]
        now_ns = self._clock.now_ns()
        return RequestExplanation(
            request_id=request_id,
            tenant=asked.tenant,
            priority=asked.priority,
            num_prompt_tokens=asked.num_prompt_tokens,
            max_tokens=asked.max_tokens,
            age_ns=now_ns - asked.arrival_ns,
            sequences=tuple(_explain(self._log, story, stories, now_ns) for story in own),
            prefix=self._prefix(request_id),
            changes=tuple(
                ExplainedChange(
                    at_ns=each.at_ns - asked.arrival_ns,
                    kind=each.kind,
                    before=each.before,
                    after=each.after,
                    made_by=each.made_by,
                    why=each.why,
                )
                for each in self._changes(asked.arrival_ns, max(map(_last_ns, own), default=now_ns))
            ),
        )

    def _prefix(self, request_id: str) -> dict[str, Any] | None:
        try:
            return self._cache.why(request_id)
        except SageLLMError:  # it has not been admitted yet, or that was too long ago
            return None


class _Waiting(NamedTuple):
    """An interval in which a sequence waited, in nanoseconds on the clock, and the steps within."""

    begun_ns: int
    ended_ns: int
    first_step: int
    last_step: int


@dataclass(slots=True)
class _Range:
    """Steps in a row, [first_step, last_step], that did not admit sequences for one cause."""

    cause: Cause
    first_step: int
    begun_ns: int
    last_step: int = -1
    ended_ns: int = -1  # when the step after the last one was planned


def _explain(log: DecisionLog, story: Story, stories: Seq[Story], now_ns: int) -> SequenceExplanation:
    intervals = list(_waiting(story, now_ns))
    ranges = _ranges(log, story.facts.key, now_ns)
    waits = _prepared(story, now_ns)
    waits += [each for interval in intervals for each in _waits(story, interval, ranges, log.forgotten_ns)]
    waited: dict[str, int] = {}
    for wait in waits:
        reason = f"pass {wait.made_by}: {wait.detail}" if wait.reason == "pass" else wait.reason
        waited[reason] = waited.get(reason, 0) + wait.duration_ns
    others = [event for event in story.events if not isinstance(event, Waited)]
    overtaken_by = _overtaken_by(story, stories, intervals)
    own_id = story.facts.sequence_id
    victims = [
        other.facts.sequence_id
        for other in stories
        for event in other.events
        if isinstance(event, Preempted) and event.preempted_for == own_id and other is not story
    ]
    return SequenceExplanation(
        sequence_id=own_id,
        state=story.state,
        events=tuple(map(replace, _timeline(others, waits))),
        num_forgotten_events=story.num_forgotten,
        waited_ns=waited,
        num_overtaken=len(overtaken_by),
        overtaken_by=tuple(overtaken_by[:MAX_LISTED]),
        num_preempted_for_it=len(victims),
        preempted_for_it=tuple(victims[:MAX_LISTED]),
        num_preemptions=story.num_preemptions,
        num_wasted_tokens=sum(
            event.num_wasted_tokens or 0 for event in others if isinstance(event, Preempted)
        ),
        num_draft_tokens=story.num_draft_tokens,
        num_accepted_tokens=story.num_accepted_tokens,
    )


def _last_ns(story: Story) -> int:
    """Return when a sequence ended, or that it has not."""
    last = story.events[-1] if story.events else None
    return story.facts.arrival_ns + last.at_ns if isinstance(last, Finished) else 1 << 62


def _prepared(story: Story, now_ns: int) -> list[Waited]:
    """Return how long its grammar was compiled, which ended when it was queued."""
    first, *rest = story.events
    if not isinstance(first, Waited) or first.reason != "grammar":
        return []
    ended_ns = rest[0].at_ns if rest else now_ns - story.facts.arrival_ns
    return [replace(first, duration_ns=ended_ns - first.at_ns)]


def _waiting(story: Story, now_ns: int) -> Iterator[_Waiting]:
    """Yield the intervals from `Queued` to `Admitted`, or to its end or now."""
    arrival_ns = story.facts.arrival_ns
    queued: Queued | None = None
    for event in story.events:
        if isinstance(event, Queued):
            queued = event
        elif queued is not None and isinstance(event, Admitted | Finished):
            last_step = event.step - 1 if isinstance(event, Admitted) else 1 << 62
            yield _Waiting(arrival_ns + queued.at_ns, arrival_ns + event.at_ns, queued.step + 1, last_step)
            queued = None
    if queued is not None and story.state == "waiting":
        yield _Waiting(arrival_ns + queued.at_ns, now_ns, queued.step + 1, 1 << 62)


def _ranges(log: DecisionLog, key: int, now_ns: int) -> tuple[list[_Range], list[_Range]]:
    """Return the ranges in which passes deferred a sequence, and those of all others, by time."""
    own: list[_Range] = []
    others: list[_Range] = []
    last: dict[Cause, _Range] = {}  # of the last change
    for change, following in pairwise((*log.changes, Change(log.step + 1, now_ns, []))):
        if following.step == change.step:
            continue
        before, last = last, {}
        for cause in change.causes:
            if cause.keys is not None and key not in cause.keys:
                continue
            if (each := before.get(cause)) is None:
                each = _Range(cause, change.step, change.at_ns)
                (others if cause.keys is None else own).append(each)
            each.last_step, each.ended_ns = following.step - 1, following.at_ns
            last[cause] = each
    return own, others


def _waits(
    story: Story, interval: _Waiting, ranges: Iterable[Seq[_Range]], forgotten_ns: int
) -> list[Waited]:
    """Return why a sequence waited in an interval, without gaps.

    A fetch takes precedence over a pass that deferred the sequence, and that over what ended the step's
    admission.
    """
    arrival_ns = story.facts.arrival_ns
    left = [(interval.begun_ns, interval.ended_ns)]
    found: list[Waited] = []
    fetched, left = _cut(left, _fetches(story, interval))
    found += [
        replace(event, at_ns=begun_ns - arrival_ns, duration_ns=ended_ns - begun_ns)
        for event, begun_ns, ended_ns in fetched
    ]
    for some in ranges:
        covered, left = _cut(left, [(each, each.begun_ns, each.ended_ns) for each in some])
        found += [_waited(piece, interval, arrival_ns) for piece in covered]
    for begun_ns, ended_ns in left:
        is_forgotten = begun_ns < forgotten_ns
        found.append(
            Waited(
                at_ns=begun_ns - arrival_ns,
                duration_ns=ended_ns - begun_ns,
                reason="forgotten" if is_forgotten else "step",
            )
        )
    return sorted(found, key=lambda wait: wait.at_ns)


def _waited(piece: tuple[_Range, int, int], interval: _Waiting, arrival_ns: int) -> Waited:
    each, begun_ns, ended_ns = piece
    cause = each.cause
    first, last = max(each.first_step, interval.first_step), min(each.last_step, interval.last_step)
    if last < first:  # it arrived after the only step of this range was planned
        return Waited(at_ns=begun_ns - arrival_ns, duration_ns=ended_ns - begun_ns, reason="step")
    return Waited(
        at_ns=begun_ns - arrival_ns,
        duration_ns=ended_ns - begun_ns,
        reason=cause.reason,
        first_step=first,
        last_step=last,
        num_steps=last - first + 1,
        made_by=cause.made_by,
        detail=cause.detail,
        least=cause.least,
        most=cause.most,
    )


def _fetches(story: Story, interval: _Waiting) -> list[tuple[Waited, int, int]]:
    """Return the fetches of an interval; each lasts until the next event, or the interval's end."""
    arrival_ns = story.facts.arrival_ns
    found = []
    for event, following in pairwise((*story.events, None)):
        if isinstance(event, Waited):
            ended_ns = interval.ended_ns if following is None else arrival_ns + following.at_ns
            found.append((event, arrival_ns + event.at_ns, ended_ns))
    return found


def _cut(
    left: Iterable[tuple[int, int]], taken: Seq[tuple[Any, int, int]]
) -> tuple[list[tuple[Any, int, int]], list[tuple[int, int]]]:
    """Split intervals into the parts that `taken`, ordered by begin, covers, and the rest. O(both)."""
    covered: list[tuple[Any, int, int]] = []
    rest: list[tuple[int, int]] = []
    place = 0
    for begun_ns, ended_ns in left:
        while place < len(taken) and taken[place][2] <= begun_ns:
            place += 1
        for what, first_ns, last_ns in taken[place:]:
            if first_ns >= ended_ns:
                break
            if first_ns > begun_ns:
                rest.append((begun_ns, first_ns))
                begun_ns = first_ns
            if last_ns > begun_ns:
                covered.append((what, begun_ns, min(last_ns, ended_ns)))
                begun_ns = min(last_ns, ended_ns)
        if begun_ns < ended_ns:
            rest.append((begun_ns, ended_ns))
    return covered, rest


def _timeline(events: Seq[Event], waits: Seq[Waited]) -> list[Event]:
    """Merge both by time; of many waits between two events, join those of one reason."""
    order = sorted((*events, *waits), key=lambda event: event.at_ns)
    timeline: list[Event] = []
    for is_wait, group in groupby(order, key=lambda event: isinstance(event, Waited)):
        some = list(group)
        timeline += _joined(some) if is_wait and len(some) > MAX_WAITS else some  # type: ignore[arg-type]
    return timeline


def _joined(waits: Seq[Waited]) -> list[Waited]:
    joined: dict[tuple[str, str, str], Waited] = {}
    for wait in waits:
        key = (wait.reason, wait.made_by, wait.detail)
        known = joined.get(key)
        if known is None:
            joined[key] = replace(wait)
            continue
        known.duration_ns += wait.duration_ns
        known.num_steps += wait.num_steps
        known.last_step = wait.last_step
        known.least = _or_none(min, known.least, wait.least)
        known.most = _or_none(max, known.most, wait.most)
    return list(joined.values())


def _or_none(choose: Callable[[list[int]], int], one: int | None, other: int | None) -> int | None:
    known = [value for value in (one, other) if value is not None]
    return choose(known) if known else None


def _overtaken_by(story: Story, stories: Seq[Story], intervals: Seq[_Waiting]) -> list[str]:
    """Return the sequences behind this one in the queue that were admitted while it waited."""
    rank = _rank(story)
    return [
        other.facts.sequence_id
        for other in stories
        if _rank(other) > rank
        for event in other.events
        if isinstance(event, Admitted)
        and any(each.begun_ns <= other.facts.arrival_ns + event.at_ns < each.ended_ns for each in intervals)
    ]


def _rank(story: Story) -> tuple[int, int, int]:
    """Return the sort key of sequences that wait."""
    return (-story.facts.priority, story.facts.arrival_ns, story.number)
