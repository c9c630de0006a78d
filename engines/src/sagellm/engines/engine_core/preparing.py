"""Sequences whose grammars are being compiled: not seen by the scheduler, and ended like any other."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any, NamedTuple

from sagellm.core import Clock, InvalidRequestError, SequenceId
from sagellm.core.plugins.failure import contained
from sagellm.core.protocols.grammar import GrammarProtocol, StructuredOutputMetrics, StructureKind
from sagellm.engines.engine_core.sequence import Sequence
from sagellm.engines.sampling.structured_outputs import StructuredOutputs

Grammar = GrammarProtocol[Any, Any]

MAX_CACHED, MAX_CACHED_BYTES = 64, 256 << 20
"""Compiled texts that are kept, the latest used, and the memory that they may take."""

_Key = tuple[StructureKind, str]


@dataclass(slots=True, eq=False)
class SequenceGrammar:
    """How far a sequence has come in what it must match: all its tokens that are committed."""

    provider: Grammar
    state: Any
    min_tokens: int  # before them no stop token is drawn, unless nothing else may follow
    error: BaseException | None = None  # why the state is no longer known


class Prepared(NamedTuple):
    """A sequence that can be queued, or why it ends."""

    sequence: Sequence
    error: BaseException | None = None


class _Done(NamedTuple):
    key: _Key
    compiled: Any
    num_bytes: int
    error: BaseException | None
    took_ns: int


class Preparing:
    """Compiles what outputs must match, on a thread of its own, and keeps what was compiled last.

    `make` returns the provider; it is called on that thread, for the first text. Sequences with equal texts
    wait for one compilation. Tenants take turns, and what nobody waits for any more is not compiled. The step
    thread makes all calls.
    """

    def __init__(self, make: Callable[[], Grammar], clock: Clock) -> None:
        self._make, self._clock = make, clock
        self._provider: Grammar | None = None
        self._compiled: OrderedDict[_Key, Any] = OrderedDict()
        self._compiled_bytes: dict[_Key, int] = {}
        self._waiting: dict[_Key, list[Sequence]] = {}
        self._key_of: dict[SequenceId, _Key] = {}
        self._changed = threading.Condition()  # guards the three below, which the thread shares
        self._turns: OrderedDict[str, dict[_Key, None]] = OrderedDict()  # what a tenant waits for, in order
        self._taken: set[_Key] = set()  # by the thread; not yet seen by `prepared`
        self._is_closed = False
        self._done: SimpleQueue[_Done] = SimpleQueue()
        self._has_news = threading.Event()
        self._thread: threading.Thread | None = None
        self._metrics = StructuredOutputMetrics()

    def __len__(self) -> int:
        return len(self._key_of)

    def __contains__(self, sequence_id: SequenceId) -> bool:
        return sequence_id in self._key_of

    def __getitem__(self, sequence_id: SequenceId) -> Sequence:
        waiting = self._waiting[self._key_of[sequence_id]]
        return next(each for each in waiting if each.sequence_id == sequence_id)

    @property
    def sequence_ids(self) -> list[SequenceId]:
        """The sequences that wait for a grammar."""
        return list(self._key_of)

    def add(self, sequence: Sequence) -> bool:
        """Give a sequence its grammar and return True, or keep it until that is compiled."""
        asked = sequence.params.structured_outputs
        assert isinstance(asked, StructuredOutputs), "it asks for one"
        key = asked.kind, asked.text
        kinds = self._metrics.num_requested
        kinds[asked.kind] = kinds.get(asked.kind, 0) + 1
        failed = None
        if key in self._compiled:
            self._compiled.move_to_end(key)
            with contained() as failure:
                self._start(sequence, self._compiled[key])
                self._metrics.num_cached += 1
                return True
            failed = failure.error
        self._key_of[sequence.sequence_id] = key
        self._waiting.setdefault(key, []).append(sequence)
        if failed is not None:
            self._done.put(_Done(key, None, 0, failed, 0))
            return False
        with self._changed:
            if key not in self._taken:
                self._turns.setdefault(sequence.request.tenant.name, {})[key] = None
                self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="sagellm-grammars", daemon=True)
            self._thread.start()
        return False

    def prepared(self) -> Iterator[Prepared]:
        """Yield the sequences whose grammars have been compiled since, or could not be."""
        while not self._done.empty():
            done = self._done.get()
            self._metrics.compile_ns += done.took_ns
            sequences = self._waiting.pop(done.key, [])
            with self._changed:
                self._taken.discard(done.key)
            if done.error is None:
                self._metrics.num_compiled += 1
                self._keep(done)
            for sequence in sequences:
                del self._key_of[sequence.sequence_id]
                failed = done.error
                if failed is None:
                    with contained() as failure:
                        self._start(sequence, done.compiled)
                    failed = failure.error
                self._metrics.num_refused += failed is not None
                yield Prepared(sequence, failed)

    def remove(self, sequence_id: SequenceId) -> Sequence:
        """Return a sequence that no longer waits; what nobody waits for is only compiled if begun."""
        sequence = self[sequence_id]
        key = self._key_of.pop(sequence_id)
        self._waiting[key].remove(sequence)
        if not self._waiting[key]:
            with self._changed:
                if key not in self._taken:
                    del self._waiting[key]
                    self._leave_out(key)
        return sequence

    def expired(self, now_ns: int) -> list[SequenceId]:
        """Return the sequences whose deadline has passed."""
        return [
            each.sequence_id
            for sequences in self._waiting.values()
            for each in sequences
            if each.request.deadline_ns is not None and each.request.deadline_ns < now_ns
        ]

    def wait(self, seconds: float) -> None:
        """Wait until something is compiled, at most so long."""
        self._has_news.wait(seconds)
        self._has_news.clear()

    def count_masks(self, num_masks: int, took_ns: int) -> None:
        """Count masks of a step."""
        self._metrics.num_masks += num_masks
        self._metrics.mask_ns += took_ns

    def metrics(self) -> StructuredOutputMetrics:
        """Return the counts."""
        return replace(
            self._metrics,
            num_preparing=len(self),
            num_requested=self._metrics.num_requested.copy(),
            provider=None if self._provider is None else self._provider.metrics(),
        )

    def close(self) -> None:
        """End the thread and the provider."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._provider is not None:
            self._provider.close()  # which ends a compilation that runs
        if self._thread is not None:
            self._thread.join(timeout=5.0)

    def _start(self, sequence: Sequence, compiled: Any) -> None:
        assert self._provider is not None, "it has compiled something"
        state = self._provider.start(compiled)
        sequence.take_grammar(SequenceGrammar(self._provider, state, sequence.params.min_tokens))

    def _keep(self, done: _Done) -> None:
        self._compiled[done.key], self._compiled_bytes[done.key] = done.compiled, done.num_bytes
        while len(self._compiled) > MAX_CACHED or sum(self._compiled_bytes.values()) > MAX_CACHED_BYTES:
            oldest, _ = self._compiled.popitem(last=False)
            del self._compiled_bytes[oldest]

    def _leave_out(self, key: _Key) -> None:
        for keys in self._turns.values():
            keys.pop(key, None)

    def _next(self) -> _Key | None:
        """Wait for what to compile next, the first of the tenant whose turn it is; None at the end."""
        with self._changed:
            while not self._is_closed:
                while self._turns:
                    tenant, keys = self._turns.popitem(last=False)
                    if not keys:
                        continue
                    key = next(iter(keys))
                    self._turns[tenant] = keys  # its next turn comes last
                    self._leave_out(key)
                    self._taken.add(key)
                    return key
                self._changed.wait()
            return None

    def _run(self) -> None:
        while (key := self._next()) is not None:
            started_ns = self._clock.now_ns()
            compiled, num_bytes = None, 0
            with contained() as failure:
                if self._provider is None:
                    self._provider = self._make()
                    if self._is_closed:  # while it was made
                        self._provider.close()
                        return
                compiled = self._provider.prepare(*key)
                num_bytes = self._provider.size_bytes(compiled)
            error = failure.error
            failure.error = None
            self._done.put(_Done(key, compiled, num_bytes, error, self._clock.now_ns() - started_ns))
            self._has_news.set()


def no_grammar() -> Grammar:
    """Refuse every structured output, in a core that has no vocabulary."""
    raise InvalidRequestError(
        "structured outputs need the text of the model's tokens, and there is no tokenizer"
    )
