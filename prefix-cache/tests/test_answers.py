"""How long answers were is remembered with the prompts that they followed."""

from __future__ import annotations

import pytest

from sagellm.core import VirtualClock
from sagellm.kvmgr.prefix_cache import RadixPrefixCache

SIZE = 4


def make(**options):
    clock = VirtualClock()
    return RadixPrefixCache(100, SIZE, clock=clock, **options), clock


def lengths(cache, token_ids):
    return [(found.num_tokens, found.num_answers, found.lengths) for found in cache.answers(token_ids)]


def test_the_latest_eight_are_kept_and_all_are_counted():
    cache, clock = make()
    cache.insert_prefix(range(8), [0, 1])
    for length in range(1, 12):
        clock.advance_ns(1)
        cache.record_answer(range(8), length)
    (found,) = cache.answers(range(8))
    assert found == (8, 11, tuple(range(4, 12)), 11)


def test_an_answer_counts_for_the_whole_blocks_of_its_prompt_alone():
    cache, _ = make()
    cache.insert_prefix(range(16), [0, 1, 2, 3])  # the prompt of ten tokens, and its answer
    cache.record_answer(range(10), 6)
    assert lengths(cache, range(8)) == [(8, 1, (6,))]
    assert lengths(cache, range(20)) == [(16, 1, (6,))]  # no other prompt has gone on otherwise
    assert lengths(cache, [*range(6), 99, 99]) == [(4, 1, (6,))]


def test_prompts_that_part_share_what_was_answered_before():
    cache, _ = make()
    cache.insert_prefix(range(12), [0, 1, 2])
    cache.record_answer(range(12), 30)
    other = [*range(8), 50, 51, 52, 53]
    cache.insert_prefix(other, [0, 1, 9])
    assert lengths(cache, other) == [(8, 1, (30,))]
    cache.record_answer(other, 70)
    assert lengths(cache, other) == [(12, 1, (70,)), (8, 2, (30, 70))]
    assert lengths(cache, range(12)) == [(12, 1, (30,)), (8, 2, (30, 70))]


def test_a_prompt_that_is_not_cached_leaves_nothing():
    cache, _ = make()
    cache.record_answer(range(8), 30)
    assert lengths(cache, range(8)) == []
    cache.insert_prefix(range(8), [0, 1])
    cache.record_answer([*range(4), 50, 51, 52, 53], 30)  # of this edge, the prompt has half
    assert lengths(cache, range(8)) == []


@pytest.mark.parametrize("max_ghost_blocks", [0, 10])
def test_evicted_prompts_are_remembered_as_long_as_their_blocks(max_ghost_blocks):
    cache, _ = make(max_ghost_blocks=max_ghost_blocks)
    cache.insert_prefix(range(12), [0, 1, 2])
    cache.record_answer(range(12), 30)
    other = [*range(8), 50, 51, 52, 53]
    cache.insert_prefix(other, [0, 1, 9])
    cache.record_answer(other, 70)
    cache.evict(4)
    known = [(12, 1, (30,)), (8, 2, (30, 70))] if max_ghost_blocks else []
    assert lengths(cache, range(12)) == known
    cache.insert_prefix(range(12), [0, 1, 2])
    assert lengths(cache, range(12)) == known[:1]
    cache.record_answer(range(12), 31)
    assert lengths(cache, range(12))[0][2][-1] == 31
    cache.check_integrity()
