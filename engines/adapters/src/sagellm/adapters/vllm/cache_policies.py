"""Our eviction policies for vLLM's KV offloading, by name. Written for vLLM 0.32.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 8589934592, "eviction_policy": "reuse",
            "cache_policy_module_path": "sagellm.adapters.vllm.cache_policies"}}'

`eviction_policy` is the name of an installed policy, with its options if there are any: `qos{within=lru}`.
vLLM has two names of its own, `lru` and `arc`; ours are `sagellm-eviction-policy:lru` and `…:arc`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from vllm.v1.kv_offload.base import OffloadKey, ReqContext, get_offload_group_idx
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus

from sagellm.adapters.chunk_tree import ChunkTree
from sagellm.core import PluginRegistry, ProviderSpec
from sagellm.core.runtime import Clock, SystemClock

_PREDICTOR = "lifetime_predictor"


@dataclass(slots=True)
class _Prompt:
    """The chunks of a request so far, in order; vLLM keeps it with the request."""

    before: dict[OffloadKey, OffloadKey | None] = field(default_factory=dict)  # by chunk, the one before it
    last: dict[int, OffloadKey] = field(default_factory=dict)  # by KV group
    told: set[int] = field(default_factory=set)  # KV groups of which the policy knows with what it began


class _Place(NamedTuple):
    before: OffloadKey | None
    depth: int  # tokens from the start of the prompt to the chunk's end


_NOWHERE = _Place(None, 0)


class TreePolicy(CachePolicy):  # type: ignore[misc]
    """Keeps chunks as a prefix tree whose leaves the eviction policy of `spec` ranks."""

    spec: ProviderSpec
    clock: Clock = SystemClock()

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._registry = PluginRegistry.load()
        self._begin()

    def _begin(self) -> None:
        registry, given = self._registry, {}
        if registry.choose("eviction_policy", self.spec).takes(_PREDICTOR):
            given[_PREDICTOR] = registry.make(_PREDICTOR, "statistical")
        policy = registry.make("eviction_policy", self.spec, **given)
        self.tree: ChunkTree[OffloadKey] = ChunkTree(policy, self.cache_capacity, clock=self.clock)
        self._statuses: dict[OffloadKey, ChunkStatus] = {}
        self._new: list[OffloadKey] = []  # chunks that are not in the tree yet
        # Chunks that may be inserted, at most as many as there is room for. A store that found none is tried
        # again, whatever else was stored since, and vLLM does not say a second time what it misses.
        self._places: dict[OffloadKey, _Place] = {}

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        """Return a chunk's status; None if it is not here."""
        return self._statuses.get(key)

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Learn where the chunks that come next belong, and which ones their request has used."""
        self._put()
        prompt = _prompt_of(req_context)
        for key in keys:
            before = prompt.before.get(key)
            self._tell(prompt, get_offload_group_idx(key), before)
            self._places.pop(key, None)  # the newest stands last
            self._places[key] = _Place(before, req_context.get_offload_key_position(key) or 0)
        num_excess = max(len(self._places) - self.cache_capacity, 0)
        for key in list(islice(self._places, num_excess)):
            del self._places[key]

    def insert(self, key: OffloadKey, chunk: ChunkStatus) -> None:
        """Add a chunk that is about to be written."""
        self._statuses[key] = chunk
        self._new.append(key)

    def remove(self, key: OffloadKey) -> None:
        """Forget a chunk that could not be written."""
        self._put()
        del self._statuses[key]
        self.tree.remove(key)

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Note that chunks were in use."""
        self._put()
        self.tree.touch(keys)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        """Note the last use of all chunks of a request."""
        self._put()
        prompt = _prompt_of(req_context)
        for keys in key_groups:
            if last := next((key for key in reversed(keys) if key in reused_keys), None):
                self._tell(prompt, get_offload_group_idx(last), last)
            self.tree.touch(keys)

    def evict(self, n: int, protected: Collection[OffloadKey]) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        """Remove exactly `n` chunks; None if there are not so many that may go."""
        self._put()
        keys = self.tree.evict(n, protected)
        return None if keys is None else [(key, self._statuses.pop(key)) for key in keys]

    def clear(self) -> None:
        """Forget everything, and what the policy has learnt."""
        self._begin()

    def mark_evictable(self, key: OffloadKey) -> None:
        """Let a chunk be evicted: it has been written, or nobody reads it any more."""
        self._put()
        self.tree.unpin(key)

    def mark_non_evictable(self, key: OffloadKey) -> None:
        """Keep a chunk that is being read."""
        self._put()
        self.tree.pin(key)

    def _tell(self, prompt: _Prompt, group: int, last: OffloadKey | None) -> None:
        """Tell the policy, once a group, which chunks a request began with: up to the last that was here."""
        if group in prompt.told:
            return
        prompt.told.add(group)
        path: list[OffloadKey] = []
        while last is not None:
            path.append(last)
            last = prompt.before.get(last)
        if path:
            self.tree.hit(path[::-1])

    def _put(self) -> None:
        """Put new chunks into the tree, those that follow one another together."""
        if not self._new:
            return
        new, self._new = self._new, []
        places = [self._places.pop(key, _NOWHERE) for key in new]
        begin = 0
        for end in range(1, len(new) + 1):
            if end < len(new) and places[end].before == new[end - 1]:
                continue
            before, ends = places[begin].before, [place.depth for place in places[begin:end]]
            if before is None or before not in self.tree:
                self.tree.insert(new[begin:end], ends, None)
            else:
                self.tree.lengthen(new[begin:end], ends, before)
            begin = end


def _prompt_of(context: ReqContext) -> _Prompt:
    """Return the chunks of a request, as far as vLLM has named them."""
    prompt: _Prompt | None = context.get_state(_Prompt)
    if prompt is None:
        prompt = _Prompt()
        context.set_state(prompt)
    named = context._offload_key_positions  # what `get_offload_key_position` looks into
    for key in islice(named, len(prompt.before), None):
        group = get_offload_group_idx(key)
        prompt.before[key] = prompt.last.get(group)
        prompt.last[group] = key
    return prompt


def cache_policy(text: str, clock: Clock | None = None) -> type[TreePolicy]:
    """Return vLLM's kind of policy for an installed eviction policy, by its name and options.

    Raises UnknownProviderError or ConfigError at once.
    """
    chosen = ProviderSpec.of(text)
    PluginRegistry.load().choose("eviction_policy", chosen).check()
    values: dict[str, Any] = {"spec": chosen} if clock is None else {"spec": chosen, "clock": clock}
    return type(f"TreePolicy[{chosen.text}]", (TreePolicy,), {"__module__": __name__, **values})


def __getattr__(name: str) -> type[TreePolicy]:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return cache_policy(name)
