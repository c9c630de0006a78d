from __future__ import annotations

from sagellm.core import Clock, EvictionPolicyProtocol, NullPrefixCache
from sagellm.core.testing import PrefixCacheContract


class TestNullPrefixCache(PrefixCacheContract):
    def make(
        self,
        max_blocks: int = 100,
        block_size: int = 4,
        *,
        eviction_policy: EvictionPolicyProtocol | None = None,
        clock: Clock | None = None,
    ) -> NullPrefixCache:
        return NullPrefixCache(max_blocks, block_size, eviction_policy=eviction_policy, clock=clock)


def test_every_lookup_misses_and_every_block_stays_with_the_caller():
    cache = NullPrefixCache(1000, 16)
    assert cache.insert_prefix(range(32), [0, 1]) == ([], 0, [], None, ())
    match = cache.lock(cache.match_prefix(range(32)), num_lookup_tokens=32)
    cache.unlock(match)
    assert match.match_length == cache.num_idle_blocks(match) == 0
    assert cache.query_by_prefix(range(32)) is None
    metrics = cache.metrics()
    assert (metrics.num_lookups, metrics.num_hits, metrics.num_lookup_tokens) == (2, 0, 64)
    assert metrics.token_hit_rate == 0.0
