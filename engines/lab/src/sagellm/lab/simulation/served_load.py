"""Runs a trace through a core, on the time of its clock: requests arrive, wait, run and are preempted."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf
from random import Random

from sagellm.core import (
    DEFAULT_TENANT,
    Clock,
    ConfigError,
    FinishReason,
    Namespace,
    Request,
    RequestId,
    SequenceId,
    StepInput,
    Tenant,
    TokenIds,
    TraceRequest,
)
from sagellm.engines.engine_core.core import EngineCore
from sagellm.engines.engine_core.sequence import Sequence
from sagellm.engines.engine_core.step_tokens import StepTokens
from sagellm.engines.progress import Advance
from sagellm.engines.requests.queued_request import QueuedSequence
from sagellm.engines.sampling.params import SamplingParams
from sagellm.lab.simulation.contents import BlockContents
from sagellm.lab.simulation.prompts import prompt_tokens
from sagellm.lab.simulation.virtual_executor import RecordedOutput

_LARGEST_ID = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class ServedRequest:
    """What became of one request; times are nanoseconds on the run's clock.

    `num_recomputed_tokens` of the prompt had been in the cache before, but no longer at its admission.
    `is_cut`: its recorded output is longer than the limit that it stated.
    """

    arrival_ns: int
    num_prompt_tokens: int
    num_output_tokens: int
    tenant: str = DEFAULT_TENANT.name
    priority: int = 0
    scheduled_ns: int | None = None
    first_token_ns: int | None = None
    finished_ns: int | None = None
    num_cached_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    is_cut: bool = False
    error: str | None = None  # why it did not run to its end


@dataclass(frozen=True, kw_only=True)
class LoadSettings:
    """How a trace is run. Arrival times are multiplied by `stretch`.

    `max_tokens` is the limit that all requests state, whatever they record; the default is the longest
    output of the trace. Outputs end at their recorded length by something that no scheduler or predictor
    sees: one of `stop_token_ids` if there are some, else, as on a model, whose tokens are not known, the
    limit of their sampling parameters. A recorded output that exceeds `max_tokens` is cut there.

    With `num_clients`, arrival times are ignored: the loop is closed. Clients take the trace's conversations
    in turn, and each sends its next request a while after its last answer, exponential with mean `think_s`.
    """

    stretch: float = 1.0
    max_tokens: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    weights: Mapping[str, float] = field(default_factory=dict)  # of tenants; 1 unless it is here
    num_clients: int | None = None
    think_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("max_tokens", "num_clients"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        if not 0 <= self.think_s < float("inf"):
            raise ConfigError(f"think_s is {self.think_s}; it must be a number of at least 0")


@dataclass(slots=True)
class _Live:
    index: int
    sequence: Sequence
    path: array[int]  # contents of its prompt's full blocks
    num_known: int | None = None  # leading blocks that had been cached before, when it was first scheduled


class LoadRun:
    """One run of a trace through one core."""

    def __init__(
        self,
        core: EngineCore,
        clock: Clock,
        requests: Seq[TraceRequest],
        settings: LoadSettings,
        *,
        on_host: Callable[[int], None] = lambda num_added: None,
    ) -> None:
        """`on_host` is called before each step with the number of requests that were added since the last."""
        self._core, self._clock, self._settings, self._on_host = core, clock, settings, on_host
        self.slept_ns = 0  # while there was nothing to do
        self._requests = requests
        self._start_ns = clock.now_ns()
        self._block_size = core.kv.seats.block_size
        self._contents = BlockContents(self._block_size)
        self._params: dict[int, SamplingParams] = {}  # by limit
        self._cached: set[int] = set()  # contents that have been in the cache
        self._live: dict[SequenceId, _Live] = {}
        self._served: list[ServedRequest | None] = [None] * len(requests)
        self._max_tokens = settings.max_tokens or max(one.num_output_tokens for one in requests)
        self._turns = [] if settings.num_clients is None else _turns(requests, settings.num_clients)
        self._client_of = {index: turns for turns in self._turns for index in turns}
        names = {one.tenant for one in requests}
        self._tenants = {
            name: Tenant(name, settings.weights.get(name, 1.0)) if name else DEFAULT_TENANT for name in names
        }

    def run(self, advance: Advance = lambda amount: None) -> list[ServedRequest]:
        """Run to the end and return what became of each request; `advance` is told how many ended."""
        core, clock = self._core, self._clock
        due = self._due = self._first_arrivals()
        while due or core.has_unfinished():
            now_ns, num_added = clock.now_ns(), 0
            if due and not core.has_unfinished():
                clock.sleep_ns(max(0, due[0][0] - now_ns))
                self.slept_ns += clock.now_ns() - now_ns
                now_ns = clock.now_ns()
            while due and due[0][0] <= now_ns:
                arrival_ns, index = heappop(due)
                self._add(index, arrival_ns)
                num_added += 1
            self._on_host(num_added)
            outputs = core.step()
            described = outputs.described if isinstance(outputs, StepTokens) else outputs
            for output in described:
                live = self._live[output.sequence_id]
                if output.scheduled_ns is not None:  # its first tokens: the prompt is cached now
                    self._cached.update(live.path)
                if output.finish_reason is not None:
                    self._end(live, output.finish_reason, output.error)
                    advance(1)
        assert all(each is not None for each in self._served), "every request ends"
        return [each for each in self._served if each is not None]

    def next_arrival_ns(self) -> float:
        """Return when the next request arrives that is not here yet, infinity if none does."""
        return self._due[0][0] if self._due else inf

    def on_step(self, step: StepInput) -> None:
        """Note what those that are scheduled for the first time could have reused; before the step runs."""
        for arrival in step.arrivals:
            live = self._live[arrival.sequence_id]
            if live.num_known is None:
                # Whatever is cached follows cached blocks.
                live.num_known = bisect_left(live.path, True, key=lambda each: each not in self._cached)

    def _first_arrivals(self) -> list[tuple[int, int]]:
        """Return a heap of times and requests: all of an open loop, of a closed one each client's first."""
        if self._settings.num_clients is not None:
            due = [(self._start_ns + self._think_ns(turns[0]), turns.popleft()) for turns in self._turns]
        else:
            stretch = self._settings.stretch
            due = [
                (self._start_ns + round(one.arrival_s * stretch * 1e9), index)
                for index, one in enumerate(self._requests)
            ]
        heapify(due)
        return due

    def _think_ns(self, index: int) -> int:
        """Return how long a client waits before a request, which is the same in every run."""
        return round(Random(f"think {index}").expovariate(1.0) * self._settings.think_s * 1e9)

    def _add(self, index: int, arrival_ns: int) -> None:
        given, settings = self._requests[index], self._settings
        tokens = self._tokens(index)
        stops = settings.stop_token_ids
        max_tokens = self._max_tokens
        name = _name(index)
        request = Request(
            request_id=RequestId(name),
            token_ids=tokens,
            max_tokens=max_tokens,
            priority=given.priority,
            arrival_ns=arrival_ns,
            namespace=Namespace(tenant=given.tenant or "default"),
            tenant=self._tenants[given.tenant],
        )
        most = max_tokens if stops else min(max_tokens, given.num_output_tokens)
        params = self._params.get(most)
        if params is None:
            params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=not stops)
            self._params[most] = params
        sequence = Sequence.of(QueuedSequence(SequenceId(name), request, params, 0, stops))
        path = self._contents.path(tokens, given.tenant)
        self._live[sequence.sequence_id] = _Live(index, sequence, path)
        self._core.add(sequence)

    def _tokens(self, index: int) -> TokenIds:
        """Return the prompt's tokens; where only its length is known, it shares nothing with others."""
        request = self._requests[index]
        if not len(request.token_ids) and not request.block_ids:
            own = (_LARGEST_ID - index).to_bytes(4, "little")
            return TokenIds(own * request.num_prompt_tokens)
        return prompt_tokens(request)[: request.num_prompt_tokens]

    def _end(self, live: _Live, reason: FinishReason, error: str | None) -> None:
        sequence, given = live.sequence, self._requests[live.index]
        del self._live[sequence.sequence_id]
        if len(given.output_token_ids):  # a later prompt may begin with it
            kept = sequence.token_ids()[: given.num_prompt_tokens + sequence.num_output_tokens - 1]
            self._cached.update(self._contents.path(kept, given.tenant))
        num_cached = sequence.num_cached_tokens or 0
        reusable = min((live.num_known or 0) * self._block_size, given.num_prompt_tokens - 1)
        self._served[live.index] = ServedRequest(
            arrival_ns=sequence.request.arrival_ns - self._start_ns,
            num_prompt_tokens=given.num_prompt_tokens,
            num_output_tokens=min(given.num_output_tokens, self._max_tokens),
            tenant=sequence.request.tenant.name,
            priority=given.priority,
            scheduled_ns=self._since(sequence.scheduled_ns),
            first_token_ns=self._since(sequence.first_token_ns),
            finished_ns=self._since(self._clock.now_ns()),
            num_cached_tokens=num_cached,
            num_recomputed_tokens=max(0, reusable - num_cached),
            num_preemptions=sequence.num_preemptions,
            finish_reason=reason,
            is_cut=given.num_output_tokens > self._max_tokens,
            error=error,
        )
        if turns := self._client_of.get(live.index):
            index = turns.popleft()
            heappush(self._due, (self._clock.now_ns() + self._think_ns(index), index))

    def _since(self, moment_ns: int | None) -> int | None:
        return None if moment_ns is None else moment_ns - self._start_ns


def _turns(requests: Seq[TraceRequest], num_clients: int) -> list[deque[int]]:
    """Deal whole conversations to clients in turn: the requests of each client, in its order."""
    turns: list[deque[int]] = [deque() for _ in range(min(num_clients, len(requests)))]
    client_of: dict[str, deque[int]] = {}
    for index, one in enumerate(requests):
        name = one.conversation or f"request {index}"
        if name not in client_of:
            client_of[name] = turns[len(client_of) % len(turns)]
        client_of[name].append(index)
    return [each for each in turns if each]


def output_lens(requests: Seq[TraceRequest]) -> dict[SequenceId, int]:
    """Return the recorded length of each output, by the sequence that it has in a run."""
    return {SequenceId(_name(index)): one.num_output_tokens for index, one in enumerate(requests)}


def recorded_outputs(requests: Seq[TraceRequest]) -> dict[SequenceId, RecordedOutput]:
    """Return what is recorded of each output, by the sequence that it has in a run."""
    return {
        SequenceId(_name(index)): RecordedOutput(one.num_output_tokens, one.output_token_ids)
        for index, one in enumerate(requests)
    }


def _name(index: int) -> str:
    return str(index)
