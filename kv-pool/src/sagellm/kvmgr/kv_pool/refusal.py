"""Why a list of block ids was refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from sagellm.core import BlockError, BlockId


def refusal(
    block_ids: Sequence[BlockId], total_blocks: int, num_refs: Callable[[BlockId], int]
) -> BlockError:
    """Name the first id that is wrong. `num_refs` tells how many references a block has, 0 if free."""
    seen: Counter[BlockId] = Counter()
    for block_id in block_ids:
        if type(block_id) is not int:
            return BlockError(f"block id {block_id!r} is a {type(block_id).__name__}; block ids are ints")
        if not 0 <= block_id < total_blocks:
            return BlockError(f"block {block_id} does not exist; block ids are 0 … {total_blocks - 1}")
        held = num_refs(block_id)
        if not held:
            return BlockError(f"block {block_id} is already free; it can be neither freed nor shared")
        seen[block_id] += 1
        if seen[block_id] > held:
            return BlockError(
                f"block {block_id} is given at least {held + 1} times in one call and has {held} "
                "reference(s); free it once for each allocate or share"
            )
    return BlockError(f"the allocator refused blocks {list(block_ids)[:8]} though each of them is allocated")
