"""The allocated blocks as a mapping."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from sagellm.core import BlockId, BlockInfo


class BlockView(Mapping[BlockId, BlockInfo]):
    """Reads a pool block by block, always as it is at that moment.

    `find` returns None for a block that is free or no block. Nothing is copied and no lock is
    held between two steps of an iteration: blocks freed by another thread meanwhile are missed.
    """

    def __init__(
        self, find: Callable[[object], BlockInfo | None], total_blocks: int, count: Callable[[], int]
    ) -> None:
        self._find = find
        self._total_blocks = total_blocks
        self._count = count

    def __getitem__(self, block_id: BlockId) -> BlockInfo:
        info = self._find(block_id)
        if info is None:
            raise KeyError(block_id)
        return info

    def __contains__(self, block_id: object) -> bool:
        return self._find(block_id) is not None

    def __iter__(self) -> Iterator[BlockId]:
        """Walk the allocated ids in ascending order, in O(total_blocks)."""
        return (BlockId(block_id) for block_id in range(self._total_blocks) if block_id in self)

    def __len__(self) -> int:
        return self._count()

    def __repr__(self) -> str:
        return f"BlockView({len(self)} of {self._total_blocks} blocks allocated)"
