"""Hands out block ids: the part of a pool that decides which blocks, and nothing else."""

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
    An id is an `int` and nothing that merely equals one: no bool, float or numpy scalar.
    `allocate`, `free` and `all_allocated` cost O(log total_blocks) a block or less.
    """

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
        """Say whether every one of these is an allocated block; False for what is no id at all."""

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
        """Accept only nothing, since nothing was handed out."""
        if block_ids:
            raise BlockError(f"blocks {list(block_ids)} were never allocated")

    def all_allocated(self, block_ids: Sequence[BlockId]) -> bool:
        """Say so of nothing only."""
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
