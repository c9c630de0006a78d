from __future__ import annotations

import random
from itertools import pairwise

import pytest

from sagellm.core import BlockId, KVAllocatorProtocol
from sagellm.kvmgr.kv_pool import BuddyAllocator
from sagellm.testing import KVAllocatorContract


def num_runs(block_ids: list[BlockId]) -> int:
    return 1 + sum(after - before != 1 for before, after in pairwise(block_ids))


def free_range(allocator: BuddyAllocator, start: int, stop: int) -> None:
    allocator.free([BlockId(block_id) for block_id in range(start, stop)])


class TestBuddyAllocator(KVAllocatorContract):
    def make(self, total_blocks: int) -> KVAllocatorProtocol:
        return BuddyAllocator(total_blocks)


class TestBuddyAllocatorOfAnOddNumber(KVAllocatorContract):
    def make(self, total_blocks: int) -> KVAllocatorProtocol:
        return BuddyAllocator(total_blocks + 43)

    test_a_million_random_operations_agree_with_a_model = None  # they tell nothing more than above


@pytest.mark.parametrize("total", range(1, 70))
def test_any_number_of_blocks_is_handed_out_whole_and_ascending(total: int) -> None:
    allocator = BuddyAllocator(total)
    allocator.check_integrity()
    assert allocator.allocate(total) == list(range(total))
    free_range(allocator, 0, total)
    allocator.check_integrity()


@pytest.mark.parametrize("num_blocks", range(1, 65))
def test_what_fits_into_one_extent_is_one_run(num_blocks: int) -> None:
    allocator = BuddyAllocator(128)
    allocator.allocate(1)
    block_ids = allocator.allocate(num_blocks)
    assert num_runs(block_ids) == 1
    assert allocator.num_free_blocks == 127 - num_blocks
    allocator.check_integrity()


def test_the_smallest_extent_that_fits_is_taken() -> None:
    allocator = BuddyAllocator(64)
    allocator.allocate(64)
    free_range(allocator, 0, 16)
    free_range(allocator, 32, 36)
    assert allocator.allocate(3) == [32, 33, 34]
    assert allocator.allocate(1) == [35]
    assert allocator.allocate(1) == [0]


def test_where_no_extent_fits_the_longest_are_taken_and_come_ascending() -> None:
    allocator = BuddyAllocator(64)
    allocator.allocate(64)
    free_range(allocator, 48, 56)
    free_range(allocator, 8, 12)
    free_range(allocator, 20, 22)
    assert allocator.allocate(11) == [8, 9, 10, *range(48, 56)]
    assert allocator.allocate(3) == [11, 20, 21]


def test_freed_blocks_join_their_buddies_in_whatever_order_they_come() -> None:
    for seed in range(20):
        allocator = BuddyAllocator(200)
        held = allocator.allocate(200)
        rng = random.Random(seed)
        rng.shuffle(held)
        while held:
            size = rng.randint(1, 20)
            allocator.free(held[:size])
            del held[:size]
            allocator.check_integrity()
        assert allocator.allocate(128) == list(range(128))


def test_a_part_of_what_was_allocated_can_be_freed() -> None:
    allocator = BuddyAllocator(32)
    block_ids = allocator.allocate(20)
    allocator.free(block_ids[3:17:2])
    assert allocator.num_free_blocks == 19
    assert allocator.all_allocated([*block_ids[:3], *block_ids[4:17:2], *block_ids[17:]])
    assert not allocator.all_allocated(block_ids[3:4])
    allocator.check_integrity()


def test_the_largest_free_run_may_span_several_extents() -> None:
    allocator = BuddyAllocator(16)
    allocator.allocate(16)
    free_range(allocator, 3, 9)
    free_range(allocator, 12, 14)
    assert allocator.metrics().largest_free_run == 6
    assert allocator.metrics().external_fragmentation == 0.25
