from __future__ import annotations

from sagellm.core import Namespace, Randomness, VirtualClock
from sagellm.kvmgr.prefix_cache import RadixPrefixCache

SIZE = 4
A, B = Namespace("a"), Namespace("b")


def blocks(first, num_blocks):
    return list(range(first, first + num_blocks))


def make(max_blocks=10_000, **options):
    return RadixPrefixCache(max_blocks, SIZE, clock=VirtualClock(), **options)


def test_a_prompt_that_is_cached_is_no_miss():
    cache = make()
    cache.insert_prefix(range(10), blocks(0, 3))
    found = cache.explain_miss(range(10))
    assert (found.cause, found.match_length, found.diverges_at) == ("none", 10, 10)


def test_what_was_evicted_is_told_with_by_whom_when_and_for_whom():
    clock = VirtualClock()
    cache = RadixPrefixCache(10, SIZE, clock=clock)
    cache.insert_prefix(range(16), blocks(0, 4), A)
    clock.advance_ns(7)
    cache.evict(3, namespace=B)
    found = cache.explain_miss([*range(16), 99], A)
    assert (found.cause, found.match_length, found.diverges_at) == ("evicted", 4, 4)
    assert (found.policy, found.evicted_ns, found.evicted_for) == ("LeafLRU", 7, "b")
    assert found.num_evicted_blocks == 3
    cache.clear()
    cleared = cache.explain_miss(range(16), A)
    assert (cleared.reason, cleared.policy, cleared.num_evicted_blocks) == ("cleared", None, 4)


def test_tokens_that_agree_for_less_than_a_block_are_a_block_border():
    cache = make(reuses_partial_blocks=False)
    cache.insert_prefix(range(12), blocks(0, 3))
    found = cache.explain_miss([*range(6), *range(50, 60)])
    assert (found.cause, found.match_length, found.diverges_at) == ("block_border", 4, 6)
    assert cache.explain_miss(range(11)).cause == "block_border"


def known_misses(cache, random):
    """Yield 1,000 prompts with the cause and the position at which each of them leaves what is cached."""
    for index in range(1_000):
        first = 10 * index
        prompt = [first, *(random.randrange(10**6) for _ in range(6 * SIZE - 1))]
        num_whole = random.randrange(1, 5)
        cause = ("evicted", "never_seen", "other_tenant", "block_border")[index % 4]
        if cause == "evicted":
            cache.insert_prefix(prompt, blocks(6 * index, 6), A)
            others = cache.lock(cache.match_prefix(prompt[: num_whole * SIZE], A))
            gone = cache.evict(6 - num_whole)
            cache.unlock(others)
            assert len(gone) == 6 - num_whole
            position = num_whole * SIZE
        elif cause == "other_tenant":
            cache.insert_prefix(prompt, blocks(6 * index, 6), B)
            cache.lock(cache.match_prefix(prompt, B))
            cache.insert_prefix(prompt[: num_whole * SIZE], blocks(10**6 + 6 * index, num_whole), A)
            position = num_whole * SIZE
        else:
            cache.insert_prefix(prompt, blocks(6 * index, 6), A)
            cache.lock(cache.match_prefix(prompt, A))
            num_inside = random.randrange(1, SIZE) if cause == "block_border" else 0
            position = num_whole * SIZE + num_inside
            prompt = [*prompt[:position], *(10**6 + value for value in prompt[position:])]
        cache.lock(cache.match_prefix(prompt, A))  # what comes next evicts none of it
        yield prompt, cause, position


def test_cause_and_position_of_1_000_known_misses_are_right_while_ghosts_are_within_budget():
    cache = make(reuses_partial_blocks=False)
    known = list(known_misses(cache, Randomness(2).stream("misses")))
    found = [cache.explain_miss(prompt, A) for prompt, _, _ in known]
    assert [(each.cause, each.diverges_at) for each in found] == [(cause, at) for _, cause, at in known]


def test_beyond_the_budget_what_was_evicted_is_unknown_and_what_never_was_is_still_told():
    cache = make(reuses_partial_blocks=False, max_ghost_blocks=1_000)
    prompts = [[index, *range(10**6, 10**6 + SIZE - 1)] for index in range(2_000)]
    for index, prompt in enumerate(prompts):
        cache.insert_prefix(prompt, [index], A)
        cache.evict(1)
    causes = [cache.explain_miss(prompt, A).cause for prompt in prompts]
    assert causes == ["unknown"] * 1_000 + ["evicted"] * 1_000
    unseen = [[10**5 + index, 0, 0, 0] for index in range(1_000)]
    assert sum(cache.explain_miss(prompt, A).cause == "never_seen" for prompt in unseen) > 990


def test_explaining_counts_and_changes_nothing():
    cache = make()
    cache.insert_prefix(range(16), blocks(0, 4))
    cache.evict(2)
    before = cache.metrics()
    cache.explain_miss(range(16))
    assert cache.metrics() == before
    cache.check_integrity()


def test_a_miss_never_ends_before_what_was_reused():
    cache = make()
    for index in range(100):
        cache.insert_prefix([index, 1, 2, 3], [index])
    found = cache.explain_miss([0, 1, 2, 9, 8])
    assert (found.match_length, found.diverges_at, found.cause) == (3, 3, "never_seen")


def test_what_was_noted_at_a_miss_explains_it_after_the_prompt_was_cached():
    clock = VirtualClock()
    cache = RadixPrefixCache(10, SIZE, clock=clock)
    cache.insert_prefix(range(16), blocks(0, 4), A)
    cache.evict(3, namespace=B)
    prompt = [*range(16), 99]
    match = cache.match_prefix(prompt, A)
    now, noted = cache.explain_miss(prompt, A), cache.note_miss(prompt, match)
    assert (now.cause, now.num_evicted_blocks) == ("evicted", 3)
    clock.advance_ns(5)
    cache.insert_prefix(range(16), [0, *blocks(10, 3)], A)
    assert cache.explain_miss(prompt[:16], A).cause == "none"
    assert noted() == now


def test_what_others_cached_after_a_miss_does_not_explain_it():
    clock = VirtualClock()
    cache = RadixPrefixCache(10, SIZE, clock=clock)
    unseen, seen = range(8), range(100, 108)
    cache.insert_prefix(seen, blocks(0, 2), B)
    explain_unseen = cache.note_miss(unseen, cache.match_prefix(unseen, A))
    explain_seen = cache.note_miss(seen, cache.match_prefix(seen, A))
    clock.advance_ns(5)
    cache.insert_prefix(unseen, blocks(4, 2), B)
    assert (explain_unseen().cause, explain_seen().cause) == ("never_seen", "other_tenant")
