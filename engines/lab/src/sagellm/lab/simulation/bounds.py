"""Bounds for every policy: a cache that never evicts, one that knows the future, and one without blocks."""

from __future__ import annotations

from bisect import bisect, insort
from collections import defaultdict
from collections.abc import Sequence as Seq
from functools import partial

from sagellm.core import PluginError, ProviderSpec, TraceRequest
from sagellm.engines.config.schema import EngineConfig
from sagellm.engines.progress import Advance
from sagellm.lab.simulation.future import Future
from sagellm.lab.simulation.prompts import kept_tokens, prompt_tokens
from sagellm.lab.simulation.replay import CacheReplay, ReplayedRequest


def replay(requests: Seq[TraceRequest], config: EngineConfig, advance: Advance) -> list[ReplayedRequest]:
    """Replay a trace through the cache of a configuration; `advance` is called with 1 for each request."""
    cache = CacheReplay(config)
    replayed = []
    for request in requests:
        replayed.append(cache.take(request))
        advance(1)
    if failure := cache.kv.cache.metrics().policy_failure:
        raise PluginError(
            f"the eviction policy {config.prefix_cache.eviction_policy.name!r} cannot be judged: {failure}"
        )
    cache.kv.manager.check_integrity()
    return replayed


def replay_unlimited(
    requests: Seq[TraceRequest], config: EngineConfig, advance: Advance
) -> list[ReplayedRequest]:
    """Replay with room for every block of every prompt, ignoring tenants' quotas."""
    size = config.kv.block_size
    num_blocks = sum(-(-len(kept_tokens(request)) // size) for request in requests)
    settings = {
        "kv.num_blocks": max(1, num_blocks),
        "prefix_cache.eviction_policy": "null",
        "prefix_cache.name": _without_quotas(config),
    }
    return replay(requests, config.with_values(settings), advance)


def replay_belady(
    requests: Seq[TraceRequest], config: EngineConfig, advance: Advance
) -> list[ReplayedRequest]:
    """Replay with Belady's policy, block by block, which is optimal.

    Optimal for this engine: a prompt needs its blocks while it is computed, whether or not they are worth
    keeping. Tenants' quotas do not apply.
    """
    future = Future(requests, config.kv.block_size)
    settings = {
        "prefix_cache.eviction_policy": ProviderSpec("belady", {"next_use": future.next_use}),
        "prefix_cache.name": _without_quotas(config),
    }
    cache = CacheReplay(config.with_values(settings))
    cache.kv.manager.evictor = lambda num_blocks, _: _evict_one_by_one(cache, num_blocks)
    replayed = []
    for index, request in enumerate(requests):
        replayed.append(cache.take(request, partial(future.take, index)))
        advance(1)
    return replayed


def count_known_tokens(requests: Seq[TraceRequest]) -> list[int]:
    """Count, for each prompt, the tokens that an unlimited cache without blocks would save.

    That is the longest prefix shared with an earlier prompt of the same tenant, and its output where that was
    recorded, without the last token, whose logits are wanted. O(log n) comparisons per prompt.
    """
    earlier: defaultdict[str, list[bytes]] = defaultdict(list)  # by tenant, sorted
    known = []
    for request in requests:
        data, sorted_prompts = prompt_tokens(request).data, earlier[request.tenant]
        # The sorted prompt with the longest common prefix is a neighbour.
        place = bisect(sorted_prompts, data)
        neighbours = sorted_prompts[max(0, place - 1) : place + 1]
        num_common = max((_count_common_bytes(data, other) // 4 for other in neighbours), default=0)
        known.append(min(num_common, max(0, request.num_prompt_tokens - 1)))
        insort(sorted_prompts, kept_tokens(request).data)
    return known


def _without_quotas(config: EngineConfig) -> ProviderSpec:
    name, options = config.prefix_cache.name.name, config.prefix_cache.name.options
    return ProviderSpec(name, {key: value for key, value in options.items() if key != "tenant_quotas"})


def _count_common_bytes(one: bytes, other: bytes) -> int:
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one.startswith(other[low:middle], low) else (low, middle - 1)
    return low


def _evict_one_by_one(cache: CacheReplay, num_blocks: int) -> int:
    num_freed = 0
    while num_freed < num_blocks and (dropped := cache.kv.cache.evict(1)):
        num_freed += cache.kv.pool.free(dropped)
    return num_freed
