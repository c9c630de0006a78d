"""Builds and connects the modules that hold KV, as named by a configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sagellm.core import (
    UNNAMED,
    Clock,
    ConfigError,
    KVIdentity,
    KVOffloadProtocol,
    KVPoolProtocol,
    PrefixCacheProtocol,
)
from sagellm.engines.engine_core.kv_cache_manager import KVCacheManager
from sagellm.engines.engine_core.seats import Seats
from sagellm.engines.modules import Modules


@dataclass(frozen=True, kw_only=True)
class KVModules:
    """Pool, prefix cache and eviction policy, and the manager in which they meet."""

    manager: KVCacheManager
    pool: KVPoolProtocol
    cache: PrefixCacheProtocol
    metrics_of: dict[str, Callable[[], Any]]


def build_kv(
    modules: Modules,
    seats: Seats,
    num_blocks: int,
    clock: Clock,
    *,
    identity: KVIdentity = UNNAMED,
    offload: KVOffloadProtocol | None = None,
) -> KVModules:
    """Make and connect them. Raises ConfigError for a pool without blocks, or a policy's wrong options."""
    kv, prefix = modules.config.kv, modules.config.prefix_cache
    allocator = modules.make("kv_allocator", kv.allocator, num_blocks)
    pool = modules.make("kv_pool", kv.pool, num_blocks, seats.block_size, allocator=allocator, clock=clock)
    if pool.get_free_blocks() < 1:
        raise ConfigError(f"kv.pool is {kv.pool.name!r}, which has no blocks; name one that has")
    policy = modules.eviction_policy(prefix.eviction_policy)
    max_blocks = min(num_blocks, prefix.max_blocks or num_blocks)
    cache: PrefixCacheProtocol = modules.make(
        "prefix_cache",
        prefix.name if prefix.enabled else "null",
        max_blocks,
        kv.block_size,
        eviction_policy=policy,
        clock=clock,
        identity=identity,
    )
    manager = KVCacheManager(
        pool,
        cache,
        seats,
        clock,
        policy=policy,
        policy_name=prefix.eviction_policy.name,
        offload=offload,
        identity=identity,
    )
    metrics = {
        "kv_pool": pool.metrics,
        "prefix_cache": cache.metrics,
        "eviction_policy": manager.policy_metrics,
    }
    if offload is not None:
        cache.keep_evicted(offload.keep)
        metrics["kv_tier"] = offload.metrics
    return KVModules(manager=manager, pool=pool, cache=cache, metrics_of=metrics)
