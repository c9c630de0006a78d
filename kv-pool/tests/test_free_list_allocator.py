from __future__ import annotations

from sagellm.core import BlockId, KVAllocatorProtocol
from sagellm.kvmgr.kv_pool import FreeListAllocator
from sagellm.testing import KVAllocatorContract


class TestFreeListAllocator(KVAllocatorContract):
    def make(self, total_blocks: int) -> KVAllocatorProtocol:
        return FreeListAllocator(total_blocks)


def test_fresh_blocks_ascend() -> None:
    allocator = FreeListAllocator(10)
    assert allocator.allocate(3) == [0, 1, 2]
    assert allocator.allocate(1) == [3]
    assert allocator.allocate(6) == [4, 5, 6, 7, 8, 9]


def test_freed_blocks_come_back_first_and_in_their_order() -> None:
    allocator = FreeListAllocator(10)
    first = allocator.allocate(3)
    allocator.allocate(2)
    allocator.free(first)
    assert allocator.allocate(4) == [0, 1, 2, 5]


def test_tuples_and_ranges_can_be_freed() -> None:
    allocator = FreeListAllocator(6)
    allocator.allocate(6)
    allocator.free((BlockId(1), BlockId(0)))
    allocator.free([BlockId(block_id) for block_id in range(2, 6)])
    allocator.check_integrity()
    assert allocator.num_free_blocks == 6


def test_the_largest_free_run_is_found() -> None:
    allocator = FreeListAllocator(10)
    allocator.allocate(10)
    allocator.free([BlockId(block_id) for block_id in (0, 1, 4, 5, 6, 9)])
    assert allocator.metrics().largest_free_run == 3
    assert allocator.metrics().external_fragmentation == 0.5
