"""Hands out block ids: the part of a pool that only decides which blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from sagellm.core.errors import BlockError, OutOfBlocksError
from sagellm.core.ids import BlockId


@dataclass(frozen=True, kw_only=True)
class AllocatorMetrics:
    """The state of an allocator. External fragmentation = 1 - largest free run ÷ free blocks."""

    total_blocks: int
    num_free_blocks: int
    largest_free_run: int

    @property
    def external_fragmentation(self) -> float:
        """1 - largest free run ÷ free blocks; 0 when nothing is free."""
        return 1 - self.largest_free_run / self.num_free_blocks if self.num_free_blocks else 0.0


class KVAllocatorProtocol(ABC):
    """Owns the ids 0 … total_blocks - 1, each either free or allocated.

    Providers are called as `factory(total_blocks)`. The pool calls it, under the pool's own
    lock; it never calls back, never blocks and knows no sequences, counts or policies.
    An id is an `int`, never a bool, float or numpy scalar that merely equals one.
    `allocate`, `free` and `all_allocated` cost O(log total_blocks) per block or less.
    """

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.num_free_blocks:,} blocks free>"

    @abstractmethod
    def allocate(self, num_blocks: int) -> list[BlockId]:
        """Take blocks, all of them or none.

        Raises OutOfBlocksError when fewer are free and BlockError when `num_blocks` < 1.
        """

    @abstractmethod
    def free(self, block_ids: Sequence[BlockId]) -> None:
        """Give blocks back, all of them or none.

        Raises BlockError for an id out of range, one that is already free, or one given twice.
        """

    @abstractmethod
    def all_allocated(self, block_ids: Sequence[BlockId]) -> bool:
        """Say whether all of these are allocated blocks; False if one is not an id at all."""

    def claim(self, block_ids: Sequence[BlockId]) -> None:
        """Take exactly these blocks, all of them or none.

        Raises BlockError for an id out of range, one that is allocated, or one given twice. May cost
        O(total_blocks); the default allocates every free block and frees the others again.
        """
        wanted = {block_id for block_id in block_ids if type(block_id) is int}
        num_free = self.num_free_blocks
        free = self.allocate(num_free) if num_free else []
        is_sound = len(wanted) == len(block_ids) and wanted.issubset(free)
        self.free([block_id for block_id in free if not is_sound or block_id not in wanted])
        if not is_sound:
            raise BlockError(f"blocks {list(block_ids)[:8]} are not all free; claim free ones, each once")

    def occupancy(self) -> bytearray:
        """Return one byte per block: 1 where it is allocated, 0 where it is free. O(total_blocks)."""
        total_blocks = self.metrics().total_blocks
        return bytearray(self.all_allocated([BlockId(block_id)]) for block_id in range(total_blocks))

    @property
    @abstractmethod
    def num_free_blocks(self) -> int:
        """Blocks that `allocate` could hand out now."""

    @abstractmethod
    def metrics(self) -> AllocatorMetrics:
        """Return the present state. May cost O(total_blocks)."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise AssertionError if the bookkeeping contradicts itself."""


class NullKVAllocator(KVAllocatorProtocol):
    """Has no blocks at all."""

    def __init__(self, total_blocks: int = 0) -> None:
        del total_blocks

    def allocate(self, num_blocks: int) -> list[BlockId]:
        """Refuse: there is nothing to give."""
        if type(num_blocks) is not int or num_blocks < 1:
            raise BlockError(f"{num_blocks!r} blocks asked for; ask for at least 1")
        raise OutOfBlocksError(
            f"{num_blocks} blocks asked for, this allocator has none", needed=num_blocks, available=0
        )

    def free(self, block_ids: Sequence[BlockId]) -> None:
        """Accept only an empty list, since nothing was handed out."""
        if block_ids:
            raise BlockError(f"blocks {list(block_ids)} were never allocated")

    def all_allocated(self, block_ids: Sequence[BlockId]) -> bool:
        """Return True only for an empty list."""
        return not block_ids

    @property
    def num_free_blocks(self) -> int:
        """Always 0."""
        return 0

    def metrics(self) -> AllocatorMetrics:
        """Return zeros."""
        return AllocatorMetrics(total_blocks=0, num_free_blocks=0, largest_free_run=0)

    def check_integrity(self) -> None:
        """Nothing can be wrong."""
