"""Replays a trace through the prefix cache, pool and policy used in serving, without a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from sagellm.core import (
    ConfigError,
    KVOffloadProtocol,
    Namespace,
    OutOfBlocksError,
    PluginRegistry,
    Request,
    RequestId,
    Runtime,
    SequenceId,
    TraceRequest,
    VirtualClock,
)
from sagellm.engines.config.schema import EngineConfig
from sagellm.engines.engine_core.kv_modules import KVModules, build_kv
from sagellm.engines.engine_core.seats import Seats
from sagellm.engines.engine_core.sequence import Sequence
from sagellm.engines.modules import Modules
from sagellm.engines.requests.queued_request import QueuedSequence
from sagellm.engines.sampling.params import SamplingParams
from sagellm.lab.simulation.prompts import kept_tokens, prompt_tokens

_PARAMS = SamplingParams(max_tokens=1)

MakeOffload = Callable[[Modules, Runtime], KVOffloadProtocol]
"""Builds the tiers below the device, on the clock of a replay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedRequest:
    """What a replay did for one prompt."""

    arrival_s: float
    num_prompt_tokens: int
    num_held_blocks: int  # in the pool when it was released
    num_saved_tokens: int = 0
    num_reused_blocks: int = 0  # full blocks that the cache had
    num_new_blocks: int = 0  # allocated for the rest
    num_cached_blocks: int = 0  # new ones that the cache took
    is_refused: bool = False  # there was no room for it even after evicting everything

    @property
    def num_blocks(self) -> int:
        """Blocks of the prompt, reused and new."""
        return self.num_reused_blocks + self.num_new_blocks


class CacheReplay:
    """One set of KV modules that processes prompts in the order of a trace.

    A prompt is matched, given blocks, cached and released at once, with its output where that was recorded:
    requests never run concurrently, so only the cache, and the tiers below it, decide what is reused.
    """

    def __init__(
        self,
        config: EngineConfig,
        registry: PluginRegistry | None = None,
        *,
        make_offload: MakeOffload | None = None,
    ) -> None:
        if config.kv.num_blocks is None:
            raise ConfigError("kv.num_blocks is null, and a replay has no model to fit it to; say how many")
        self.config = config
        self.clock = VirtualClock()
        modules = Modules(registry or PluginRegistry.load(), config)
        runtime = replace(Runtime.virtual(), clock=self.clock)
        offload = None if make_offload is None else make_offload(modules, runtime)
        size, num_blocks = config.kv.block_size, config.kv.num_blocks
        seats = Seats(1, block_size=size)
        self.kv: KVModules = build_kv(modules, seats, num_blocks, self.clock, offload=offload)
        self._num_requests = 0

    def run(self, requests: Iterable[TraceRequest]) -> Iterator[ReplayedRequest]:
        """Yield the result for each prompt."""
        return map(self.take, requests)

    def take(
        self, request: TraceRequest, on_admitted: Callable[[Sequence], None] | None = None
    ) -> ReplayedRequest:
        """Run one prompt; `on_admitted` sees its blocks while it has them."""
        manager = self.kv.manager
        self.clock.advance_ns(max(0, round(request.arrival_s * 1e9) - self.clock.now_ns()))
        sequence = self._sequence(request)
        before = self._num_cached_blocks()
        while manager.is_fetching(sequence):
            manager.poll()
        try:
            manager.admit(sequence)
        except OutOfBlocksError:
            return self._outcome(request, is_refused=True)
        if on_admitted is not None:
            on_admitted(sequence)
        size, num_prompt = self.config.kv.block_size, len(prompt_tokens(request))
        num_cached = min(sequence.num_cached_tokens or 0, num_prompt - 1)
        num_reused = num_cached // size
        num_new = -(-num_prompt // size) - num_reused
        manager.commit(sequence, sequence.num_tokens)
        manager.release(sequence)
        manager.take_copies()  # there is no KV to copy
        return self._outcome(
            request,
            num_saved_tokens=min(num_cached, request.num_prompt_tokens),
            num_reused_blocks=num_reused,
            num_new_blocks=num_new,
            num_cached_blocks=min(num_new, self._num_cached_blocks() - before),
        )

    def _num_cached_blocks(self) -> int:
        """Full blocks that the cache has taken so far."""
        cache = self.kv.cache.metrics()
        return cache.num_inserted_blocks - cache.num_inserted_partial_blocks

    def _sequence(self, request: TraceRequest) -> Sequence:
        self._num_requests += 1
        name = str(self._num_requests)
        asked = Request(
            request_id=RequestId(name),
            token_ids=kept_tokens(request),
            max_tokens=1,
            arrival_ns=self.clock.now_ns(),
            namespace=Namespace(tenant=request.tenant or "default"),
        )
        return Sequence.of(QueuedSequence(SequenceId(name), asked, _PARAMS, 0, frozenset()))

    def _outcome(self, request: TraceRequest, **counts: Any) -> ReplayedRequest:
        return ReplayedRequest(
            arrival_s=request.arrival_s,
            num_prompt_tokens=request.num_prompt_tokens,
            num_held_blocks=self.kv.pool.total_blocks - self.kv.pool.get_free_blocks(),
            **counts,
        )
