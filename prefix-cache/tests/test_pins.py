from __future__ import annotations

import pytest

from sagellm.core import InvalidInputError, Namespace, Randomness, VirtualClock, pack
from sagellm.kvmgr.prefix_cache import RadixPrefixCache

SYSTEM = list(range(1000, 1032))


@pytest.fixture
def clock():
    return VirtualClock()


@pytest.fixture
def cache(clock):
    return RadixPrefixCache(100, 4, clock=clock, max_pinned_blocks=20)


def blocks(first, num_blocks):
    return list(range(first, first + num_blocks))


def test_a_pinned_prefix_survives_100_000_evictions_and_goes_at_its_end(cache, clock):
    cache.insert_prefix(SYSTEM, blocks(10**7, 8))
    assert cache.pin(SYSTEM, ttl_s=60.0).num_pinned_tokens == 32
    random, num_evicted, index = Randomness(1).stream("prompts"), 0, 0
    while num_evicted < 100_000:
        prompt = [random.randrange(900) for _ in range(40)]
        cache.insert_prefix(prompt, blocks(10 * index, 10))
        num_evicted += len(cache.evict(random.randrange(60)))
        index += 1
    assert cache.match_prefix(SYSTEM).match_length == 32
    cache.clear()
    assert cache.match_prefix(SYSTEM).match_length == 32
    clock.advance_ns(59 * 10**9)
    assert (cache.num_evictable_blocks, cache.evict(100)) == (0, [])
    clock.advance_ns(10**9)
    assert cache.num_evictable_blocks == 8
    assert sorted(cache.evict(100)) == blocks(10**7, 8)
    cache.check_integrity()


def test_a_hit_sets_the_time_anew_and_a_mere_match_does_not(cache, clock):
    cache.insert_prefix(SYSTEM, blocks(0, 8))
    cache.pin(SYSTEM, ttl_s=10.0)
    for _ in range(5):
        clock.advance_ns(9 * 10**9)
        cache.match_prefix([*SYSTEM, 1, 2, 3, 4])
        cache.unlock(cache.lock(cache.match_prefix([*SYSTEM, 1]), num_lookup_tokens=33))
    assert cache.evict(8) == []
    clock.advance_ns(9 * 10**9)
    cache.match_prefix(SYSTEM)
    clock.advance_ns(10**9)
    assert len(cache.evict(8)) == 8


def test_what_is_not_cached_or_beyond_the_budget_is_not_pinned_and_the_result_says_so(cache):
    cache.insert_prefix(SYSTEM, blocks(0, 4))
    half = cache.pin([*SYSTEM, 5, 6])
    assert (half.num_tokens, half.num_pinned_tokens) == (34, 16)
    assert "only 16 tokens are cached" in half.reason
    long = list(range(100))
    cache.insert_prefix(long, blocks(10, 25))
    cut = cache.pin(long)
    assert (cut.num_pinned_tokens, cut.num_pinned_blocks, cut.max_pinned_blocks) == (64, 20, 20)
    assert cut.reason == "20 of the 20 blocks that may be pinned are"
    assert sorted(cache.evict(100)) == blocks(26, 9)
    cache.check_integrity()


@pytest.mark.parametrize(
    ("tokens", "namespace", "reason"),
    [
        (SYSTEM[:3], Namespace(), "a block has 4 tokens, and only whole blocks are pinned"),
        (SYSTEM, Namespace("b"), "nothing at all is cached for tenant 'b'"),
        (SYSTEM, Namespace("default", "s"), "nothing at all is cached for tenant 'default' with this salt"),
        (SYSTEM, Namespace.public("docs"), "nothing at all is cached for the public namespace 'docs'"),
        (list(range(8)), Namespace(), "nothing of it is cached; send the prompt once, then pin it"),
    ],
)
def test_where_nothing_is_pinned_the_result_says_why(cache, tokens, namespace, reason):
    cache.insert_prefix(SYSTEM, blocks(0, 8))
    nothing = cache.pin(tokens, namespace)
    assert (nothing.num_pinned_tokens, nothing.reason) == (0, reason)
    assert cache.pins() == []


def test_pins_are_listed_with_their_tokens_and_what_is_left_of_their_time(cache, clock):
    cache.insert_prefix(SYSTEM, blocks(0, 8))
    cache.insert_prefix(SYSTEM, blocks(10, 8), Namespace("b"))
    cache.pin(SYSTEM[:14], ttl_s=10.0)
    cache.pin(SYSTEM, Namespace("b"))
    cache.insert_prefix([*SYSTEM[:8], 1, 2, 3, 4], [0, 1, 50])
    clock.advance_ns(4 * 10**9)
    short, whole = cache.pins()
    assert (short.token_ids, short.ttl_s, short.left_s) == (pack(SYSTEM[:12]), 10.0, 6.0)
    assert (whole.token_ids, whole.namespace, whole.left_s) == (pack(SYSTEM), Namespace("b"), None)
    clock.advance_ns(6 * 10**9)
    assert cache.pins() == [whole]


def test_what_two_pins_share_counts_once(cache):
    cache.insert_prefix(SYSTEM, blocks(0, 8))
    cache.pin(SYSTEM[:16])
    assert cache.pin(SYSTEM).num_pinned_blocks == 8
    assert cache.pin(SYSTEM).num_pinned_blocks == 8
    assert cache.metrics().num_pins == 2
    assert cache.unpin(SYSTEM[:20]) == 1
    assert cache.metrics().num_pinned_blocks == 8
    assert cache.unpin(SYSTEM) == 1
    assert (cache.metrics().num_pinned_blocks, cache.num_evictable_blocks) == (0, 8)
    assert cache.unpin(SYSTEM) == 0
    cache.check_integrity()


def test_a_pin_is_no_lock_that_somebody_else_could_undo(cache):
    cache.insert_prefix(SYSTEM, blocks(0, 8))
    cache.pin(SYSTEM)
    match = cache.lock(cache.match_prefix(SYSTEM))
    cache.unlock(match)
    with pytest.raises(ValueError, match="not locked"):
        cache.unlock(match)
    assert cache.evict(8) == []


def test_a_pin_lives_on_when_its_path_is_split(cache):
    cache.insert_prefix(SYSTEM, blocks(0, 8))
    cache.pin(SYSTEM)
    cache.insert_prefix([*SYSTEM[:8], 1, 2, 3, 4], [0, 1, 50])
    cache.check_integrity()
    assert cache.evict(100) == [50]
    assert cache.unpin(SYSTEM) == 1
    cache.check_integrity()


def test_pins_belong_to_a_namespace(cache):
    cache.insert_prefix(SYSTEM, blocks(0, 8), Namespace("a"))
    assert cache.pin(SYSTEM, Namespace("b")).num_pinned_tokens == 0
    assert cache.pin(SYSTEM, Namespace("a")).num_pinned_tokens == 32
    assert cache.unpin(SYSTEM, Namespace("b")) == 0


@pytest.mark.parametrize("ttl_s", [0, -1.0, float("nan"), float("inf")])
def test_a_time_that_is_none_is_refused(cache, ttl_s):
    with pytest.raises(InvalidInputError, match="ttl_s"):
        cache.pin(SYSTEM, ttl_s=ttl_s)
