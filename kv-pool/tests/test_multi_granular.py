from __future__ import annotations

import pytest

from sagellm.core import BlockError, ConfigError, OutOfBlocksError, Randomness
from sagellm.kvmgr.kv_pool import Extent, KVPoolConfig, MultiGranularKVPool
from sagellm.testing import run_in_threads


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


@pytest.mark.parametrize("num_operations", [5_000, pytest.param(250_000, marks=pytest.mark.full)])
def test_random_operations_lose_no_token_and_give_none_twice(num_operations):
    pool = make()
    churn(pool, 0, num_operations, 1 if num_operations < 10_000 else 100)
    assert pool.get_free_tokens() == 4096
    assert pool.metrics().external_fragmentation == 0
    pool.check_integrity()


@pytest.mark.parametrize("num_operations", [500, pytest.param(30_000, marks=pytest.mark.full)])
def test_eight_threads_share_a_pool(num_operations):
    pool = make()
    run_in_threads(lambda thread: churn(pool, thread, num_operations, 100), num_threads=8)
    assert pool.get_free_tokens() == 4096
    pool.check_integrity()


def test_external_fragmentation_is_that_of_runs_whatever_pieces_they_are_of():
    pool = make(1024)
    (whole,), (page,), (token,) = (pool.allocate(size) for size in (256, 16, 1))
    metrics = pool.metrics()
    assert (whole.start, page.start, token.start) == (0, 256, 272)
    assert metrics.largest_free_run == metrics.free_tokens == 1024 - 273
    assert metrics.external_fragmentation == 0
    assert metrics.whole_tokens == 512
    pool.free([whole])
    metrics = pool.metrics()
    assert metrics.external_fragmentation == 1 - 751 / 1007


def compact(pool: MultiGranularKVPool, tables: list[list[Extent]], memory: list[int]) -> None:
    for source, target in pool.compact():
        tokens = tokens_of(pool, [target])
        assert all(memory[token] < 0 for token in tokens)  # nothing that lives is written over
        for old, new in zip(tokens_of(pool, [source]), tokens, strict=True):
            memory[new], memory[old] = memory[old], -1
        (table,) = [table for table in tables if source in table]
        table[table.index(source)] = target


@pytest.mark.parametrize("page_tokens", [1, 16, 64])
@pytest.mark.parametrize("seed", range(3))
def test_compaction_keeps_every_token_and_leaves_one_free_run(seed, page_tokens):
    pool = make(4096, 64, page_tokens)
    random = Randomness(seed).stream("compaction")
    tables: list[list[Extent]] = []
    memory = [-1] * 4096
    for number in range(1500):
        if (
            random.random() < 0.6
            and (num_tokens := random.choice((5, 30, 100, 300))) < pool.get_free_tokens()
        ):
            tables.append(pool.allocate(num_tokens))
            for token in tokens_of(pool, tables[-1]):
                memory[token] = number
        elif tables:
            table = tables.pop(random.randrange(len(tables)))
            assert len({memory[token] for token in tokens_of(pool, table)} - {-1}) == 1
            for token in tokens_of(pool, table):
                memory[token] = -1
            pool.free(table)
        if number % 50 == 0:
            free_tokens = pool.get_free_tokens()
            compact(pool, tables, memory)
            pool.check_integrity()
            metrics = pool.metrics()
            assert metrics.free_tokens == free_tokens
            assert free_tokens - metrics.largest_free_run < 64
            assert pool.compact() == []
            assert sum(value >= 0 for value in memory) == 4096 - free_tokens
    assert len(tables) > 5
    for table in tables:
        pool.free(table)
    assert pool.compact() == []
    assert len(pool.allocate(4096)) == 64
