"""Several tiers as one: what does not fit moves down, what is used often moves up again."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Container, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import itemgetter
from threading import Lock
from typing import TypeAlias

from sagellm.core.checks import require_object
from sagellm.core.errors import ConfigError
from sagellm.core.kv_block import BlockHeader, BlockKey
from sagellm.core.protocols.kv_tier import (
    KVTierMetrics,
    KVTierProtocol,
    Ticket,
    TierOutcome,
    TierRequest,
    TierResult,
    check_requests,
)
from sagellm.core.runtime import Clock, SystemClock
from sagellm.kvmgr.kv_pool.tiers.classifier import COLDEST_FIRST, HotColdClassifier, Temperature
from sagellm.kvmgr.kv_pool.tiers.guarded_tier import GuardedTier

_HOT = COLDEST_FIRST["hot"]
_NUM_LOOKED_AT = 32
"""Number of least recently used blocks among which the coldest is evicted."""


@dataclass(slots=True, eq=False)
class Usage:
    """One block's history, in nanoseconds of the storage's clock."""

    header: BlockHeader
    num_bytes: int
    since_ns: int
    last_ns: int
    num_uses: int = 1

    def frequency(self, now_ns: int) -> float:
        """Return uses per second since it arrived, counting at least one second."""
        return self.num_uses / max(1.0, (now_ns - self.since_ns) / 1e9)

    def temperature(self, now_ns: int, classifier: HotColdClassifier) -> Temperature:
        """Classify the block in its current state."""
        return classifier.classify((now_ns - self.last_ns) / 1e9, self.frequency(now_ns))


class TierUsage(OrderedDict[BlockKey, Usage]):
    """The blocks of one tier by their last use, in this or a faster tier."""

    def __init__(self, classifier: HotColdClassifier) -> None:
        super().__init__()
        self._classifier = classifier

    def add(self, usage: Usage) -> None:
        """Add a block as the most recently used."""
        self[usage.header.key] = usage
        self.move_to_end(usage.header.key)

    def refresh(self, key: BlockKey) -> Usage | None:
        """Move a block to the end of the order, as it is in use elsewhere; do not count a use."""
        usage = self.get(key)
        if usage is not None:
            self.move_to_end(key)
        return usage

    def use(self, key: BlockKey, now_ns: int) -> Usage | None:
        """Record a use."""
        usage = self.refresh(key)
        if usage is not None:
            usage.num_uses += 1
            self._classifier.observe_gap((now_ns - usage.last_ns) / 1e9)
            usage.last_ns = now_ns
        return usage

    def victim(self, now_ns: int, busy: Container[BlockKey]) -> Usage | None:
        """Return the coldest of the least recently used idle blocks, the least recently used among equals."""
        idle = (usage for key, usage in self.items() if key not in busy)
        looked_at = [(usage, self._heat(usage, now_ns)) for usage in islice(idle, _NUM_LOOKED_AT)]
        if not looked_at:
            return None
        victim, heat = min(looked_at, key=itemgetter(1))
        for usage, each in looked_at:
            if usage is victim or each == _HOT > heat:  # spared for its frequency
                self._classifier.observe_frequency(usage.frequency(now_ns))
        return victim

    def _heat(self, usage: Usage, now_ns: int) -> int:
        return COLDEST_FIRST[usage.temperature(now_ns, self._classifier)]


_MAX_DEMOTIONS = 64
"""Blocks that one put may demote; sizes differ, so one may not be enough."""

_Steps: TypeAlias = Generator[tuple[int, TierRequest], TierOutcome, TierOutcome]
"""An operation as a conversation with tiers: yields a tier's number and a request, receives the outcome."""


@dataclass(slots=True, eq=False)
class _Submit:
    ticket: Ticket
    outcomes: list[TierOutcome | None]
    num_open: int


@dataclass(slots=True, eq=False)
class _Operation:
    """One request of one submit, waiting for a tier or for another operation on the same block."""

    submit: _Submit
    place: int
    key: BlockKey
    steps: _Steps


def _nothing() -> _Steps:
    return "done"
    yield


_HELD = _Operation(_Submit(Ticket(-1), [], 0), 0, BlockKey(0, b""), _nothing())
"""Placed before the operations on a block that is being moved."""


@dataclass(kw_only=True)
class TieredMetrics(KVTierMetrics):
    """Counts of the whole, and of moves between tiers."""

    num_demoted: int = 0
    num_promoted: int = 0
    num_fallbacks: int = 0  # puts that a tier could not take and passed to a lower one
    num_dropped: int = 0  # demoted from the last tier
    tiers: dict[str, KVTierMetrics] = field(default_factory=dict)


class TieredKVStorage(KVTierProtocol):
    """Tiers by name, the fastest first; each block is in one of them.

    A put goes to the first tier, even if the block was in a lower one. A full tier demotes its coldest blocks
    to the next one, and the last tier drops them; a tier that fails, or is full of busy blocks, is skipped,
    and one that raises is no longer used. A get reads from the tier that has the block; a block that is
    then hot moves up, if there is room. The classifier decides both.

    Operations on one block run in sequence, on several in the order of the tiers' answers. One lock guards
    everything; `get_cost_ns` takes none.
    """

    def __init__(
        self,
        tiers: Mapping[str, KVTierProtocol],
        *,
        classifier: HotColdClassifier | None = None,
        clock: Clock | None = None,
    ) -> None:
        if not tiers:
            raise ConfigError("a tiered storage needs at least one tier")
        for name, tier in tiers.items():
            require_object(f"tier {name!r}", tier, KVTierProtocol, "kv_tier")
        self.names = tuple(tiers)
        self.classifier = HotColdClassifier() if classifier is None else classifier
        self._tiers = tuple(GuardedTier[_Operation](name, tier) for name, tier in tiers.items())
        self._usages = tuple(TierUsage(self.classifier) for _ in self._tiers)
        self._clock = SystemClock() if clock is None else clock
        self._lock = Lock()
        self._busy: dict[BlockKey, deque[_Operation]] = {}  # the first is running
        self._ready: deque[_Operation] = deque()  # now first on their blocks
        self._results: list[TierResult] = []
        self._num_submits = 0
        self._metrics = TieredMetrics()
        for level, guarded in enumerate(self._tiers):
            self._adopt(level, guarded.stored())

    def __repr__(self) -> str:
        tiers = ", ".join(f"{name}: {tier!r}" for name, tier in zip(self.names, self._tiers, strict=True))
        return f"<{type(self).__name__} {tiers}>"

    def submit(self, requests: Sequence[TierRequest]) -> Ticket:
        """Begin all requests that no other operation blocks."""
        check_requests(requests)
        with self._lock:
            ticket = Ticket(self._num_submits)
            self._num_submits += 1
            submit = _Submit(ticket, [None] * len(requests), len(requests))
            if not requests:
                self._results.append(TierResult(ticket, ()))
            for place, request in enumerate(requests):
                operation = _Operation(submit, place, request.header.key, self._steps_of(request))
                queue = self._busy.setdefault(operation.key, deque())
                queue.append(operation)
                if len(queue) == 1:
                    self._advance(operation, None)
            self._pump()
        return ticket

    def poll(self) -> list[TierResult]:
        """Poll every tier and resume waiting operations."""
        with self._lock:
            self._pump()
            results, self._results = self._results, []
        return results

    def contains(self, key: BlockKey) -> bool:
        """Look in its tier; a block that is moving between tiers counts as present."""
        with self._lock:
            return key in self._busy or any(tier.contains(key) for tier in self._tiers)

    def level_of(self, key: BlockKey) -> int | None:
        """Return the number of the tier that has a block."""
        with self._lock:
            return self._level_of(key)

    def touch(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Make these the last to be evicted; a put is wanted for what is not in the first tier."""
        with self._lock:
            return [self._touch(key) for key in keys]

    def get_cost_ns(self, keys: Sequence[BlockKey]) -> int:
        """Add up the tiers' estimates."""
        return sum(tier.get_cost_ns(keys) for tier in self._tiers)

    def metrics(self) -> TieredMetrics:
        """Return the counts so far."""
        with self._lock:
            tiers = {name: tier.metrics() for name, tier in zip(self.names, self._tiers, strict=True)}
            counts = replace(self._metrics, num_blocks=sum(map(len, self._usages)))
        return replace(
            counts,
            tiers=tiers,
            num_bytes=sum(tier.num_bytes for tier in tiers.values()),
            max_bytes=sum(tier.max_bytes for tier in tiers.values()),
            num_corrupt=sum(tier.num_corrupt for tier in tiers.values()),
            num_failed=sum(tier.num_failed for tier in tiers.values()),
        )

    def check_integrity(self) -> None:
        """Raise AssertionError if a block is in two tiers, or an idle one is not in its tier."""
        with self._lock:
            self._check_integrity()

    def close(self) -> None:
        """Close all tiers."""
        with self._lock:
            for tier in self._tiers:
                tier.close()

    def _check_integrity(self) -> None:
        for tier in self._tiers:
            tier.check_integrity()
        keys = [key for usage in self._usages for key in usage]
        assert len(keys) == len(set(keys)), "a block is in two tiers"
        for usage, tier in zip(self._usages, self._tiers, strict=True):
            if tier.metrics().num_failed:
                continue  # a failing tier may have lost or found blocks by itself
            lost = [key for key in usage if key not in self._busy and not tier.contains(key)]
            assert not lost, f"{len(lost)} blocks are noted in a tier that does not have them"
            if not self._busy:
                assert len(usage) == tier.metrics().num_blocks, (
                    "a tier has blocks that the storage does not know"
                )
        if not any(tier.is_waited_for for tier in self._tiers):
            assert not self._busy, "operations wait for nothing"

    def _level_of(self, key: BlockKey) -> int | None:
        for level, (usage, tier) in enumerate(zip(self._usages, self._tiers, strict=True)):
            if key in usage and tier.contains(key):
                return level
        return None

    def _adopt(self, level: int, stored: Sequence[tuple[BlockHeader, int]]) -> None:
        """Record what a tier found in it, except blocks that a faster tier has too."""
        now_ns = self._clock.now_ns()
        for header, num_bytes in stored:
            key = header.key
            if key not in self._busy and self._noted_at(key) is None and self._tiers[level].contains(key):
                self._usages[level].add(Usage(header, num_bytes, now_ns, now_ns))

    def _steps_of(self, request: TierRequest) -> _Steps:
        match request.action:
            case "put":
                return self._put(request)
            case "get":
                return self._get(request)
            case "delete":
                return self._delete(request)

    def _put(self, request: TierRequest) -> _Steps:
        key = request.header.key
        level, usage = self._find(request), None
        if level is not None and not self._tiers[level].contains(key):
            self._usages[level].pop(key, None)
            level = None
        if level == 0:
            return "done"
        assert request.data is not None, "submit has looked"
        now_ns = self._clock.now_ns()
        if level is not None:
            usage = self._usages[level].refresh(key)
        usage = usage or Usage(request.header, request.data.nbytes, now_ns, now_ns)
        outcome = yield from self._put_from(0, request, usage)
        if level is not None and self._noted_at(key) != level:  # it has moved up
            self._usages[level].pop(key, None)
            yield level, TierRequest("delete", request.header)
        self._metrics.num_puts += outcome == "done"
        self._metrics.num_full += outcome == "full"
        return outcome

    def _put_from(self, first: int, request: TierRequest, usage: Usage) -> _Steps:
        """Store in the first tier, from `first` on, that can take it, after making room there."""
        outcome: TierOutcome = "full"
        for level in range(first, len(self._tiers)):
            outcome = yield level, request
            num_demoted = 0
            while outcome == "full" and num_demoted < _MAX_DEMOTIONS:
                if (yield from self._demote_one(level)) != "done":
                    break
                num_demoted += 1
                outcome = yield level, request
            if outcome == "done":
                self._usages[level].add(usage)
                return "done"
            self._metrics.num_fallbacks += 1
        return outcome

    def _demote_one(self, level: int) -> _Steps:
        """Move the coldest idle block of a tier down, or drop it from the last one."""
        victim = self._usages[level].victim(self._clock.now_ns(), self._busy)
        if victim is None:  # it may be full of blocks found when it reconnected
            self._adopt(level, self._tiers[level].stored())
            victim = self._usages[level].victim(self._clock.now_ns(), self._busy)
        if victim is None:
            return "missing"
        key = victim.header.key
        self._busy[key] = deque((_HELD,))
        try:
            self._usages[level].pop(key, None)
            moved: TierOutcome = "full"
            if level + 1 < len(self._tiers):
                data = memoryview(bytearray(victim.num_bytes))
                moved = yield level, TierRequest("get", victim.header, data)
                if moved == "done":
                    put = TierRequest("put", victim.header, data)
                    moved = yield from self._put_from(level + 1, put, victim)
            self._metrics.num_demoted += moved == "done"
            self._metrics.num_dropped += moved != "done"
            yield level, TierRequest("delete", victim.header)
            return "done"
        finally:
            self._end(key)

    def _get(self, request: TierRequest) -> _Steps:
        key = request.header.key
        self._metrics.num_gets += 1
        level = self._find(request)
        if level is None:
            return "missing"
        started_ns = self._clock.now_ns()
        outcome = yield level, request
        usage = self._usages[level]
        if outcome != "done":
            if not self._tiers[level].contains(key):
                usage.pop(key, None)
            return outcome
        assert request.data is not None, "submit has looked"
        self._metrics.num_hits += 1
        self._metrics.get_bytes += request.data.nbytes
        self._metrics.get_ns += self._clock.now_ns() - started_ns
        used = usage.use(key, self._clock.now_ns())
        if level and used is not None and self._is_hot(used):
            yield from self._promote(level, request, used)
        return "done"

    def _is_hot(self, usage: Usage) -> bool:
        return usage.frequency(usage.last_ns) >= self.classifier.hot_frequency_threshold

    def _promote(self, level: int, request: TierRequest, usage: Usage) -> _Steps:
        """Move a block up if there is free room; demote nothing for it."""
        put = TierRequest("put", request.header, request.data)
        outcome = yield level - 1, put
        if outcome == "done":
            self._usages[level].pop(request.header.key, None)
            self._usages[level - 1].add(usage)
            self._metrics.num_promoted += 1
            yield level, TierRequest("delete", request.header)
        return outcome

    def _delete(self, request: TierRequest) -> _Steps:
        level = self._find(request)
        if level is None:
            return "missing"
        self._usages[level].pop(request.header.key, None)
        return (yield level, request)

    def _touch(self, key: BlockKey) -> bool:
        level = self._noted_at(key)
        if level is not None:
            self._usages[level].refresh(key)
        elif key in self._busy:  # on its way down
            return False
        return level != 0 or not self._tiers[0].contains(key)

    def _noted_at(self, key: BlockKey) -> int | None:
        return next((level for level, usage in enumerate(self._usages) if key in usage), None)

    def _find(self, request: TierRequest) -> int | None:
        """Return the tier that has a block; adopt a block that its tier found after the start."""
        header = request.header
        level = self._noted_at(header.key)
        if level is None:
            level = next((n for n, tier in enumerate(self._tiers) if tier.contains(header.key)), None)
            if level is not None:
                now_ns = self._clock.now_ns()
                num_bytes = 0 if request.data is None else request.data.nbytes
                self._usages[level].add(Usage(header, num_bytes, now_ns, now_ns))
        return level

    def _pump(self) -> None:
        """Deliver outcomes to operations until no tier has any more."""
        progressed = True
        while progressed:
            progressed = False
            for tier in self._tiers:
                for operation, outcome in tier.poll():
                    progressed = True
                    self._advance(operation, outcome)

    def _advance(self, operation: _Operation, outcome: TierOutcome | None) -> None:
        """Advance an operation until it waits for a tier again or ends, then those after it."""
        self._go_on(operation, outcome)
        while self._ready:
            self._go_on(self._ready.popleft(), None)

    def _go_on(self, operation: _Operation, outcome: TierOutcome | None) -> None:
        try:
            level, request = next(operation.steps) if outcome is None else operation.steps.send(outcome)
        except StopIteration as stopped:
            submit = operation.submit
            submit.outcomes[operation.place] = stopped.value
            submit.num_open -= 1
            if not submit.num_open:
                done = tuple(each for each in submit.outcomes if each is not None)
                self._results.append(TierResult(submit.ticket, done))
            self._end(operation.key)
            return
        self._tiers[level].submit(request, operation)

    def _end(self, key: BlockKey) -> None:
        """Let the next operation on a block begin."""
        queue = self._busy[key]
        queue.popleft()
        if not queue:
            del self._busy[key]
        else:
            self._ready.append(queue[0])
