"""Why blocks were refused: a list of ids, or a number asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from sagellm.core import BlockError, BlockId, ConfigError, OutOfBlocksError


def check_total(total_blocks: int) -> None:
    """Raise ConfigError unless this is a positive int."""
    if type(total_blocks) is not int or total_blocks < 1:
        raise ConfigError(f"kv.num_blocks is {total_blocks!r}; it must be an int >= 1")


def no_number(num_blocks: object, by: str = "") -> BlockError:
    """Return the error for an invalid number; `by` names the caller."""
    return BlockError(f"{num_blocks!r} blocks asked for{by}; ask for an int >= 1")


def no_ids(block_ids: object) -> BlockError:
    """Return the error for what is not a sequence."""
    return BlockError(f"block ids must be a sequence of ints, not {block_ids!r}")


def shortage(num_blocks: int, available: int, total_blocks: int, by: str = "") -> OutOfBlocksError:
    """Return the error for more blocks than are free."""
    return OutOfBlocksError(
        f"{num_blocks} blocks asked for{by}, {available} of {total_blocks} are free; "
        "free or evict blocks, or raise kv.num_blocks",
        needed=num_blocks,
        available=available,
    )


def no_claim(block_ids: Sequence[BlockId], occupancy: Sequence[int]) -> BlockError:
    """Return the error for the first id that cannot be claimed."""
    seen: set[BlockId] = set()
    for block_id in block_ids:
        if type(block_id) is not int:
            return BlockError(f"block id {block_id!r} is a {type(block_id).__name__}; block ids are ints")
        if not 0 <= block_id < len(occupancy):
            return BlockError(f"block {block_id} does not exist; block ids are 0 … {len(occupancy) - 1}")
        if occupancy[block_id] or block_id in seen:
            what = "given twice" if block_id in seen else "allocated"
            return BlockError(f"block {block_id} is {what}; claim free blocks, each once")
        seen.add(block_id)
    return BlockError(f"the allocator refused blocks {list(block_ids)[:8]} though each of them is free")


def refusal(
    block_ids: Sequence[BlockId], total_blocks: int, num_refs: Callable[[BlockId], int]
) -> BlockError:
    """Return the error for the first wrong id. `num_refs` gives a block's references, 0 if free."""
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
