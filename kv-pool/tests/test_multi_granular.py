from __future__ import annotations

import pytest

from sagellm.core import BlockError, ConfigError, OutOfBlocksError, Randomness
from sagellm.core.testing import run_in_threads
from sagellm.kvmgr.kv_pool.multi_granular import Extent, KVPoolConfig, MultiGranularKVPool


def make(total_tokens: int = 4096, sequence_tokens: int = 256, page_tokens: int = 16) -> MultiGranularKVPool:
    config = KVPoolConfig(total_tokens=total_tokens, sequence_tokens=sequence_tokens, page_tokens=page_tokens)
    return MultiGranularKVPool(config)


def tokens_of(pool: MultiGranularKVPool, extents: list[Extent]) -> list[int]:
    return [
        token
        for granularity, start in extents
        for token in range(start, start + pool.config.size_of(granularity))
    ]


def test_a_sequence_gets_its_tokens_exactly_in_the_largest_pieces():
    pool = make()
    extents = pool.allocate(256 + 2 * 16 + 3)
    assert [extent.granularity for extent in extents] == ["sequence", "page", "page", *["token"] * 3]
    assert len(set(tokens_of(pool, extents))) == 256 + 2 * 16 + 3
    assert pool.get_free_tokens() == 4096 - 291
    pool.check_integrity()
    pool.free(extents)
    assert pool.metrics().external_fragmentation == 0
    assert pool.metrics().num_extents == {"sequence": 0, "page": 0, "token": 0}


def test_an_allocation_fails_only_where_fewer_tokens_are_free():
    pool = make(512)
    small = [pool.allocate(1) for _ in range(512)]
    for extents in small[::2]:
        pool.free(extents)
    assert len(tokens_of(pool, pool.allocate(256))) == 256
    with pytest.raises(OutOfBlocksError, match="1 tokens asked for, 0 of 512 are free"):
        pool.allocate(1)
    pool.check_integrity()


def test_allocate_100_and_50_free_the_first_allocate_80_overlaps_nothing():
    pool = make(4096)
    first, second = pool.allocate(100), pool.allocate(50)
    pool.free(first)
    third = pool.allocate(80)
    assert set(tokens_of(pool, second)).isdisjoint(tokens_of(pool, third))
    pool.check_integrity()


def test_wrong_calls_are_refused_and_change_nothing():
    pool = make()
    extents = pool.allocate(20)
    for wrong in (0, -1, 1.5, "1", None, True):
        with pytest.raises(BlockError, match="tokens asked for"):
            pool.allocate(wrong)
    for wrong in ([Extent("page", 4000)], [*extents, extents[0]], [*extents, None], [("page", 0)], [[]]):
        with pytest.raises(BlockError):
            pool.free(wrong)
    assert pool.get_free_tokens() == 4096 - 20
    pool.free(extents)
    with pytest.raises(BlockError, match="is not allocated"):
        pool.free(extents)
    pool.check_integrity()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((100, 16, 16), "total_tokens is 100; it must be a multiple of 16"),
        ((96, 48, 10), "sequence_tokens is 48"),
        ((0, 16, 16), "at least 1"),
        ((True, 16, 16), "at least 1"),
    ],
)
def test_sizes_that_do_not_divide_each_other_are_refused(sizes, message):
    with pytest.raises(ConfigError, match=message):
        make(*sizes)


def churn(pool: MultiGranularKVPool, seed: int, num_operations: int, check_every: int) -> None:
    random = Randomness(seed).stream("churn")
    held: list[list[Extent]] = []
    num_held = 0
    for step in range(num_operations):
        if random.random() < 0.5:
            num_tokens = random.choice(
                (random.randint(1, 15), random.randint(16, 300), random.randint(1, 900))
            )
            try:
                extents = pool.allocate(num_tokens)
            except OutOfBlocksError:
                pass
            else:
                assert len(tokens_of(pool, extents)) == num_tokens
                held.append(extents)
                num_held += num_tokens
        elif held:
            extents = held.pop(random.randrange(len(held)))
            num_held -= len(tokens_of(pool, extents))
            pool.free(extents)
        if step % check_every == 0:
            pool.check_integrity()
    for extents in held:
        pool.free(extents)


@pytest.mark.parametrize("num_operations", [5_000, pytest.param(1_000_000, marks=pytest.mark.full)])
def test_random_operations_lose_no_token_and_give_none_twice(num_operations):
    pool = make()
    churn(pool, 0, num_operations, 1 if num_operations < 10_000 else 100)
    assert pool.get_free_tokens() == 4096
    assert pool.metrics().external_fragmentation == 0
    pool.check_integrity()


def test_eight_threads_share_a_pool():
    pool = make()
    run_in_threads(lambda thread: churn(pool, thread, 500, 50), num_threads=8)
    assert pool.get_free_tokens() == 4096
    pool.check_integrity()
