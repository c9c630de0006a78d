from __future__ import annotations

import re

import pytest

from sagellm.core import BlockError, BlockId, ConfigError, KVAllocatorProtocol, OutOfBlocksError
from sagellm.core.testing import KVAllocatorContract
from sagellm.kvmgr.kv_pool import FreeListAllocator


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


@pytest.mark.parametrize("total", [0, -1, True, 1.0, "8", None])
def test_a_number_of_blocks_that_is_none_is_refused(total: object) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"kv.num_blocks is {total!r}")):
        FreeListAllocator(total)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("block_ids", "message"),
    [
        ([0, 4], "block 4 is already free"),
        ([0, 9], "block 9 does not exist; block ids are 0 … 7"),
        ([0, -1], "block -1 does not exist"),
        ([0, 1, 0], "block 0 is given at least 2 times in one call and has 1 reference"),
        ([True], "block id True is a bool"),
        ([1.0], "block id 1.0 is a float"),
    ],
)
def test_an_error_names_the_id_and_what_is_wrong(block_ids: list[BlockId], message: str) -> None:
    allocator = FreeListAllocator(8)
    allocator.allocate(4)
    with pytest.raises(BlockError, match=re.escape(message)):
        allocator.free(block_ids)
    assert allocator.num_free_blocks == 4


def test_a_shortage_names_both_numbers_and_the_setting() -> None:
    allocator = FreeListAllocator(8)
    allocator.allocate(5)
    with pytest.raises(OutOfBlocksError, match=r"4 blocks asked for, 3 of 8 are free;.*kv\.num_blocks"):
        allocator.allocate(4)


def test_the_largest_free_run_is_found() -> None:
    allocator = FreeListAllocator(10)
    allocator.allocate(10)
    allocator.free([BlockId(block_id) for block_id in (0, 1, 4, 5, 6, 9)])
    assert allocator.metrics().largest_free_run == 3
    assert allocator.metrics().external_fragmentation == 0.5
