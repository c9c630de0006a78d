from __future__ import annotations

import pytest

from sagellm.core import BlockError, Namespace, VirtualClock
from sagellm.core.protocols.prefix_cache import PartialMatch
from sagellm.kvmgr.prefix_cache import CrossRequestKVCache, RadixPrefixCache
from sagellm.kvmgr.prefix_cache.node import count_common_tokens


@pytest.fixture
def cache():
    return RadixPrefixCache(20, 4, clock=VirtualClock())


def test_a_last_block_that_is_not_full_is_kept_and_matched_in_part(cache):
    result = cache.insert_prefix([1, 2, 3, 4, 5, 6, 7], [10, 11])
    assert (result.block_ids, result.num_new_blocks, result.partial_block_id) == ([10], 1, 11)
    match = cache.match_prefix([1, 2, 3, 4, 5, 6, 99, 98])
    assert (match.match_length, match.block_ids, match.partial) == (6, [10], PartialMatch(11, 2))
    cache.check_integrity()


def test_a_prompt_shorter_than_a_block_matches_too(cache):
    cache.insert_prefix([1, 2, 3], [10])
    assert cache.match_prefix([1, 2, 9]).partial == PartialMatch(10, 2)
    assert cache.match_prefix([9, 1, 2]).match_length == 0
    locked = cache.lock(cache.match_prefix([1, 2, 9]), num_lookup_tokens=3)
    cache.unlock(locked)
    assert cache.metrics().num_partial_hit_tokens == 2
    assert cache.evict(1) == [10]
    cache.check_integrity()


def test_a_full_block_matches_in_part_where_prompts_leave_each_other_inside_it(cache):
    cache.insert_prefix(range(12), [10, 11, 12])
    assert cache.match_prefix([*range(6), 99]).partial == PartialMatch(11, 2)
    assert cache.match_prefix(range(7)).partial == PartialMatch(11, 3)
    assert cache.match_prefix([0, 99]).partial == PartialMatch(10, 1)


def test_of_several_siblings_the_one_that_agrees_longest_is_taken(cache):
    for first, tail in ((10, [5, 0, 0, 0]), (20, [5, 6, 7, 0]), (30, [5, 6, 0, 0])):
        cache.insert_prefix([1, 2, 3, 4, *tail], [10, first + 1])
    assert cache.match_prefix([1, 2, 3, 4, 5, 6, 7, 8]).partial == PartialMatch(21, 3)


def test_partial_blocks_go_before_full_ones_and_the_longest_unused_first():
    clock = VirtualClock()
    cache = RadixPrefixCache(20, 4, clock=clock)
    cache.insert_prefix(range(9), [0, 1, 2])
    cache.insert_prefix(range(50, 55), [5, 6])
    cache.insert_prefix(range(70, 73), [7])
    clock.advance_ns(1)
    cache.unlock(cache.lock(cache.match_prefix(range(9)), num_lookup_tokens=9))
    assert [cache.evict(1) for _ in range(4)] == [[6], [7], [2], [5]]


def test_what_goes_on_replaces_the_partial_block_and_gives_it_back(cache):
    cache.insert_prefix(range(6), [0, 1])
    result = cache.insert_prefix(range(8), [0, 5])
    assert (result.num_new_blocks, result.released_block_ids) == (1, (1,))
    assert cache.metrics().num_blocks == 2
    longer = cache.insert_prefix(range(11), [0, 5, 6])
    again = cache.insert_prefix(range(10), [0, 5, 7])
    assert (longer.partial_block_id, again.partial_block_id) == (6, None)
    cache.check_integrity()


def test_the_very_block_may_be_offered_again_with_more_in_it(cache):
    cache.insert_prefix(range(5), [0, 1])
    more = cache.insert_prefix(range(7), [0, 1])
    assert (more.partial_block_id, more.released_block_ids) == (None, ())
    assert cache.match_prefix(range(7)).partial == PartialMatch(1, 3)
    full = cache.insert_prefix(range(12), [0, 1, 2])
    assert (full.block_ids, full.num_new_blocks, full.released_block_ids) == ([0, 1, 2], 1, ())
    assert cache.metrics().num_partial_blocks == 0
    cache.check_integrity()
    with pytest.raises(BlockError, match="1"):
        cache.insert_prefix([9, 9, 9], [1])


def test_four_partial_blocks_are_kept_behind_a_node(cache):
    for index in range(6):
        result = cache.insert_prefix([1, 2, 3, 4, index], [0, 10 + index])
    assert result.released_block_ids == (11,)
    assert cache.metrics().num_partial_blocks == 4


def test_a_locked_sequence_can_lose_its_partial_block_and_nothing_else(cache):
    cache.insert_prefix(range(6), [0, 1])
    locked = cache.lock(cache.match_prefix(range(6)))
    assert cache.num_evictable_blocks == 1
    assert cache.evict(5) == [1]
    cache.unlock(locked)
    assert cache.evict(5) == [0]


def test_whoever_needs_whole_blocks_shortens_the_match(cache):
    cache.insert_prefix(range(6), [0, 1])
    match = cache.match_prefix(range(6))
    whole = match._replace(match_length=4, partial=None)
    cache.unlock(cache.lock(whole, num_lookup_tokens=6))
    assert (cache.metrics().num_hit_tokens, cache.metrics().num_partial_hit_tokens) == (4, 0)


def test_a_query_tells_how_much_of_the_last_block_agrees(cache):
    cache.insert_prefix(range(6), [0, 1])
    found = CrossRequestKVCache(cache).try_reuse([0, 1, 2, 3, 4, 9])
    assert [(each.block_id, each.start, each.num_tokens) for each in found] == [(0, 0, 4), (1, 4, 1)]


def test_no_partial_block_is_kept_where_it_is_not_wanted():
    cache = RadixPrefixCache(20, 4, reuses_partial_blocks=False)
    assert cache.insert_prefix(range(6), [0, 1]).partial_block_id is None
    assert cache.match_prefix(range(6)).match_length == 4


def test_namespaces_share_no_part_of_a_block(cache):
    cache.insert_prefix(range(6), [0, 1], Namespace("a"))
    assert cache.match_prefix(range(6), Namespace("b")) == cache.match_prefix([], Namespace("b"))


@pytest.mark.parametrize("num_equal", range(1, 16))
def test_a_block_matches_exactly_as_far_as_it_agrees(num_equal):
    cache = RadixPrefixCache(20, 16)
    cache.insert_prefix(range(16), [7])
    prompt = [*range(num_equal), *range(100, 116 - num_equal)]
    assert cache.match_prefix(prompt).partial == PartialMatch(7, num_equal)
    cache.insert_prefix([*range(16), *range(50, 50 + num_equal)], [7, 8])  # the last one is not full
    assert cache.match_prefix([*range(16), *range(50, 66)]).partial == PartialMatch(8, num_equal)


@pytest.mark.parametrize("num_tokens", [1, 5, 16, 64])
def test_common_tokens_are_counted_whole(num_tokens):
    one = b"".join(index.to_bytes(4, "little") for index in range(256, 256 + num_tokens))
    for place in range(len(one)):
        other = bytearray(one)
        other[place] ^= 0x80
        assert count_common_tokens(one, bytes(other)) == place // 4
    assert count_common_tokens(one[:8], one) == len(one[:8]) // 4
