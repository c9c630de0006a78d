"""What every allocator refuses, and what it says then."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest

from sagellm.core import BlockError, BlockId, ConfigError, KVAllocatorProtocol, OutOfBlocksError
from sagellm.kvmgr.kv_pool import BuddyAllocator, FreeListAllocator

Make: TypeAlias = Callable[[Any], KVAllocatorProtocol]


@pytest.fixture(params=[BuddyAllocator, FreeListAllocator])
def make(request: pytest.FixtureRequest) -> Make:
    return request.param


@pytest.mark.parametrize("total", [0, -1, True, 1.0, "8", None])
def test_a_number_of_blocks_that_is_none_is_refused(make: Make, total: object) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"kv.num_blocks is {total!r}")):
        make(total)


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
def test_an_error_names_the_id_and_what_is_wrong(make: Make, block_ids: list[BlockId], message: str) -> None:
    allocator = make(8)
    allocator.allocate(4)
    with pytest.raises(BlockError, match=re.escape(message)):
        allocator.free(block_ids)
    assert allocator.num_free_blocks == 4
    allocator.check_integrity()


def test_a_shortage_names_both_numbers_and_the_setting(make: Make) -> None:
    allocator = make(8)
    allocator.allocate(5)
    with pytest.raises(OutOfBlocksError, match=r"4 blocks asked for, 3 of 8 are free;.*kv\.num_blocks"):
        allocator.allocate(4)
