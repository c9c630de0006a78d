"""What every prefix cache must do."""

from __future__ import annotations

import time

import pytest

from sagellm.core.ids import BlockId
from sagellm.core.namespace import DEFAULT, Namespace
from sagellm.core.protocols.eviction import EvictionPolicyProtocol
from sagellm.core.protocols.prefix_cache import PrefixCacheProtocol, PrefixMatch
from sagellm.core.runtime import Clock, Randomness, VirtualClock
from sagellm.core.testing.eviction_audit import AuditingEvictionPolicy
from sagellm.core.testing.prefix_cache_model import PrefixCacheMachine
from sagellm.core.testing.prefix_cache_threads import ThreadedCache, YieldingClock, YieldingPolicy
from sagellm.core.tokens import pack


def blocks(first: int, num_blocks: int) -> list[BlockId]:
    """Return consecutive block ids."""
    return [BlockId(first + index) for index in range(num_blocks)]


OTHER = Namespace("other")


class PrefixCacheContract:
    """Holds for every prefix cache, even one that remembers nothing. Override `make`."""

    max_match_s = 0.002  # median of one match of 512 tokens
    max_evict_s = 0.002  # per block, among 2,000 leaves

    def make(
        self,
        max_blocks: int = 100,
        block_size: int = 4,
        *,
        eviction_policy: EvictionPolicyProtocol | None = None,
        clock: Clock | None = None,
    ) -> PrefixCacheProtocol:
        """Return a new cache."""
        raise NotImplementedError

    def test_a_new_cache_is_empty(self) -> None:
        """No match, nothing to evict, all counts zero."""
        cache = self.make()
        assert cache.match_prefix(range(16)) == PrefixMatch(
            0, [], DEFAULT, None, cache.match_prefix([]).version
        )
        assert cache.num_evictable_blocks == 0
        assert cache.evict(3) == cache.clear() == []
        assert cache.metrics().num_lookups == cache.metrics().num_blocks == 0
        assert cache.metrics().token_hit_rate == 0.0
        cache.check_integrity()

    @pytest.mark.parametrize("block_size", [1, 2, 3])
    @pytest.mark.parametrize("with_policy", [False, True])
    def test_random_operations_agree_with_a_plain_model(self, block_size: int, with_policy: bool) -> None:  # noqa: FBT001
        """Each operation gives what a dict would, and the bookkeeping is whole after each."""
        policy = AuditingEvictionPolicy() if with_policy else None
        cache = self.make(40, block_size, eviction_policy=policy, clock=VirtualClock())
        PrefixCacheMachine(cache, block_size, Randomness(block_size).stream("operations")).run(10_000)

    @pytest.mark.full
    def test_a_million_random_operations_agree_with_a_plain_model(self) -> None:
        """A longer run, with the bookkeeping checked at every hundredth."""
        cache = self.make(40, 2)
        PrefixCacheMachine(cache, 2, Randomness(0).stream("operations")).run(1_000_000, check_every=100)

    def test_two_caches_share_nothing(self) -> None:
        """What one holds, another does not know."""
        busy, idle = self.make(), self.make()
        match = busy.lock(busy.match_prefix(range(8)), num_lookup_tokens=8)
        busy.insert_prefix(range(8), blocks(0, 2))
        busy.unlock(match)
        assert idle.match_prefix(range(8)).match_length == 0
        assert idle.metrics() == self.make().metrics()

    def test_pins_are_listed_until_they_are_ended(self) -> None:
        """With the tokens and namespace to end them; empty if pins are not supported."""
        cache = self.make(clock=VirtualClock())
        cache.insert_prefix(range(8), blocks(0, 2), OTHER)
        num_pinned = cache.pin(range(10), OTHER, ttl_s=5.0).num_pinned_tokens
        pins = cache.pins()
        assert [len(pin.token_ids) for pin in pins] == ([num_pinned] if num_pinned else [])
        for pin in pins:
            assert (pin.token_ids, pin.namespace) == (pack(range(num_pinned)), OTHER)
            assert (pin.ttl_s, pin.left_s) == (5.0, 5.0)
            assert cache.unpin(pin.token_ids, pin.namespace) == 1
        assert cache.pins() == []
        cache.check_integrity()

    def test_threads_lose_no_block_and_get_none_twice(self) -> None:
        """Eight of them: every match holds its tokens, every block that the cache took comes back once."""
        cache = self.make(60, 2, eviction_policy=YieldingPolicy(), clock=YieldingClock())
        ThreadedCache(cache).run(20_000)

    @pytest.mark.full
    def test_threads_lose_no_block_in_a_million_operations(self) -> None:
        """A longer run."""
        ThreadedCache(self.make(60, 2)).run(1_000_000, seed=1)

    def test_a_match_of_512_tokens_is_cheap(self) -> None:
        """No work grows quadratically."""
        cache = self.make(1000, 16)
        tokens = pack(range(512))
        cache.insert_prefix(tokens, blocks(0, 32))
        durations_s = []
        for _ in range(101):
            start = time.perf_counter()
            cache.match_prefix(tokens)
            durations_s.append(time.perf_counter() - start)
        assert sorted(durations_s)[50] < self.max_match_s
