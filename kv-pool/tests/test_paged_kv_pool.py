from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from sagellm.core import (
    AllocatorMetrics,
    BlockAllocationRequest,
    BlockError,
    BlockId,
    Clock,
    ConfigError,
    KVAllocatorProtocol,
    KVPoolProtocol,
    OutOfBlocksError,
    SequenceId,
)
from sagellm.kvmgr.kv_pool import BuddyAllocator, FreeListAllocator, GPUKVPool, PagedKVPool
from sagellm.testing import KVPoolContract, run_in_threads


def ask(num_blocks: int, sequence_id: str = "x") -> BlockAllocationRequest:
    return BlockAllocationRequest(num_blocks=num_blocks, sequence_id=SequenceId(sequence_id))


class TestPagedKVPool(KVPoolContract):
    def make(self, total_blocks: int, block_size: int, clock: Clock) -> KVPoolProtocol:
        return PagedKVPool(total_blocks, block_size, clock=clock)


class TestPagedKVPoolWithBuddies(KVPoolContract):
    def make(self, total_blocks: int, block_size: int, clock: Clock) -> KVPoolProtocol:
        return PagedKVPool(total_blocks, block_size, allocator=BuddyAllocator(total_blocks), clock=clock)


class DescendingAllocator(FreeListAllocator):
    """Stands for an allocator from elsewhere: ids the other way round, and claimed as any allocator can."""

    claim = KVAllocatorProtocol.claim

    def occupancy(self) -> bytearray:
        return super().occupancy()[::-1]

    def allocate(self, num_blocks: int) -> list[BlockId]:
        return [self._mirror(block_id) for block_id in super().allocate(num_blocks)]

    def free(self, block_ids: Sequence[BlockId]) -> None:
        super().free([self._mirror(block_id) for block_id in block_ids])

    def all_allocated(self, block_ids: Sequence[BlockId]) -> bool:
        return super().all_allocated([self._mirror(block_id) for block_id in block_ids])

    def _mirror(self, block_id: BlockId) -> BlockId:
        return BlockId(self._total_blocks - 1 - block_id) if type(block_id) is int else block_id


class TestPagedKVPoolWithAnotherAllocator(KVPoolContract):
    def make(self, total_blocks: int, block_size: int, clock: Clock) -> KVPoolProtocol:
        return PagedKVPool(total_blocks, block_size, allocator=DescendingAllocator(total_blocks), clock=clock)

    # The million operations tell nothing more than with our own allocators.
    test_a_million_random_operations_agree_with_a_model = None
    test_a_million_random_operations_of_eight_threads_agree_with_a_model = None


def test_the_allocator_decides_which_blocks() -> None:
    pool = PagedKVPool(4, allocator=DescendingAllocator(4))
    assert pool.allocate(ask(2)) == [3, 2]


def test_the_source_documents_name_is_the_same_pool() -> None:
    assert GPUKVPool is PagedKVPool
    pool = GPUKVPool()
    assert (pool.total_blocks, pool.block_size) == (10_000, 16)
    assert GPUKVPool(total_blocks=100, block_size=8).get_free_blocks() == 100


@pytest.mark.parametrize("value", [0, -16, True, 16.0, "16", None])
@pytest.mark.parametrize(
    ("name", "key"), [("block_size", "kv.block_size"), ("total_blocks", "kv.num_blocks")]
)
def test_a_size_that_is_none_is_refused(name: str, key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{key} is {value!r}")):
        PagedKVPool(**{name: value})  # type: ignore[arg-type]


def test_an_allocator_of_another_size_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv\.num_blocks is 8, but the allocator has 9 of 9"):
        PagedKVPool(8, allocator=FreeListAllocator(9))


def test_an_allocator_in_use_is_refused() -> None:
    allocator = FreeListAllocator(8)
    allocator.allocate(1)
    with pytest.raises(ConfigError, match="7 of 8 blocks free"):
        PagedKVPool(8, allocator=allocator)


def test_a_shortage_names_the_sequence_the_numbers_and_the_setting() -> None:
    pool = PagedKVPool(100)
    pool.allocate(ask(97))
    message = (
        "12 blocks asked for by sequence 'x', 3 of 100 are free; free or evict blocks, or raise kv.num_blocks"
    )
    with pytest.raises(OutOfBlocksError, match=re.escape(message)):
        pool.allocate(ask(12))


def test_a_refused_size_names_the_sequence() -> None:
    with pytest.raises(BlockError, match="0 blocks asked for by sequence 'x'"):
        PagedKVPool(8).allocate(ask(0))


@pytest.mark.parametrize(
    ("block_ids", "message"),
    [
        ([1, 3], "block 3 is already free"),
        ([1, 8], "block 8 does not exist; block ids are 0 … 7"),
        ([0, 0, 0], "block 0 is given at least 3 times in one call and has 2 reference(s)"),
        ([1, [2]], "block id [2] is a list"),
        (5, "block ids must be a sequence of ints, not 5"),
    ],
)
def test_an_error_names_the_id_and_what_is_wrong(block_ids: list[BlockId], message: str) -> None:
    pool = PagedKVPool(8)
    pool.share(pool.allocate(ask(3))[:1])
    with pytest.raises(BlockError, match=re.escape(message)):
        pool.free(block_ids)
    assert pool.get_free_blocks() == 5
    pool.check_integrity()


def test_the_list_that_was_handed_out_is_the_callers_to_change() -> None:
    pool = PagedKVPool(8)
    block_ids = pool.allocate(ask(3))
    given = list(block_ids)
    block_ids.clear()
    assert pool.free(given) == 3
    given.clear()
    pool.check_integrity()


@pytest.mark.parametrize("num_blocks", [-1, True, 1.5])
def test_a_number_of_wanted_blocks_is_checked(num_blocks: int) -> None:
    with pytest.raises(BlockError, match="free blocks wanted"):
        PagedKVPool(8).evict_if_needed(num_blocks)


def test_an_evictor_that_frees_in_small_steps_is_asked_again() -> None:
    pool = PagedKVPool(8)
    held = pool.allocate(ask(8))
    pool.set_evictor(lambda num_blocks: pool.free([held.pop()]))
    assert pool.evict_if_needed(5) == 5
    assert pool.metrics().num_evicted_blocks == 5


def test_threads_that_share_the_same_blocks_lose_no_count() -> None:
    pool = PagedKVPool(16)
    common = pool.allocate(ask(8))

    def work(thread: int) -> None:
        for _ in range(1000):
            pool.share(common)
            assert pool.free(common) == 0

    run_in_threads(work, num_threads=4)
    assert [pool.block_info[block_id].ref_count for block_id in common] == [1] * 8
    assert pool.free(common) == 8
    pool.check_integrity()


def test_threads_may_evict_at_the_same_time() -> None:
    pool = PagedKVPool(64)
    cached = pool.allocate(ask(60))

    def evict(num_blocks: int) -> int:
        victims = []
        for _ in range(num_blocks):
            try:
                victims.append(cached.pop())
            except IndexError:
                break
        return pool.free(victims)

    def work(thread: int) -> None:
        for _ in range(200):
            pool.evict_if_needed(4)
            try:
                block_ids = pool.allocate(ask(4, f"thread-{thread}"))
            except OutOfBlocksError:
                continue
            pool.free(block_ids)

    pool.set_evictor(evict)
    run_in_threads(work, num_threads=4)
    assert pool.metrics().num_used_blocks == len(cached)
    pool.check_integrity()


def test_threads_that_write_to_the_same_block_get_one_each() -> None:
    pool = PagedKVPool(64)
    (common,) = pool.allocate(ask(1))
    pool.share([common] * 31)
    written: list[list[BlockId]] = [[] for _ in range(4)]

    def work(thread: int) -> None:
        written[thread] += [pool.copy_on_write(common, SequenceId(f"thread-{thread}")) for _ in range(8)]

    run_in_threads(work, num_threads=4)
    blocks = [block_id for of_thread in written for block_id in of_thread]
    assert len(set(blocks)) == 32
    assert common in blocks  # the last writer had it for itself
    assert [pool.block_info[block_id].ref_count for block_id in blocks] == [1] * 32
    pool.check_integrity()


class WatchedAllocator(FreeListAllocator):
    """Lets other threads in during each call, and refuses to be called by one of them."""

    def __init__(self, total_blocks: int) -> None:
        super().__init__(total_blocks)
        self._is_busy = False

    @contextmanager
    def _watched(self) -> Iterator[None]:
        assert not self._is_busy, "two threads are inside the allocator"
        self._is_busy = True
        time.sleep(0)
        try:
            yield
        finally:
            self._is_busy = False

    def allocate(self, num_blocks: int) -> list[BlockId]:
        with self._watched():
            return super().allocate(num_blocks)

    def free(self, block_ids: Sequence[BlockId]) -> None:
        with self._watched():
            super().free(block_ids)

    def all_allocated(self, block_ids: Sequence[BlockId]) -> bool:
        with self._watched():
            return super().all_allocated(block_ids)

    def metrics(self) -> AllocatorMetrics:
        with self._watched():
            return super().metrics()


@pytest.mark.parametrize(
    "call",
    [
        lambda pool, block_id: pool.free(pool.allocate(ask(1))),
        lambda pool, block_id: pool.free([block_id]),
        lambda pool, block_id: pool.share([block_id]),
        lambda pool, block_id: pool.copy_on_write(block_id, SequenceId("x")),
        lambda pool, block_id: pool.block_info[block_id],
        lambda pool, block_id: pool.metrics(),
    ],
    ids=["allocate", "free", "share", "copy_on_write", "block_info", "metrics"],
)
def test_no_call_enters_the_allocator_beside_another(call: Callable[[PagedKVPool, BlockId], object]) -> None:
    pool = PagedKVPool(1000, allocator=WatchedAllocator(1000))
    (common,) = pool.allocate(ask(1))
    pool.share([common] * 400)

    def work(thread: int) -> None:
        for _ in range(100):
            call(pool, common)

    run_in_threads(work, num_threads=4)


def test_a_view_says_how_much_it_shows() -> None:
    pool = PagedKVPool(8)
    pool.allocate(ask(3))
    assert repr(pool.block_info) == "BlockView(3 of 8 blocks allocated)"
    assert "0" not in pool.block_info


def test_the_name_of_an_allocator_is_no_allocator() -> None:
    with pytest.raises(ConfigError, match=r"allocator is 'buddy'; .*resolve\('kv_allocator', 'buddy'\)"):
        PagedKVPool(16, 16, allocator="buddy")  # type: ignore[arg-type]
