"""The pool of KV blocks: who holds each block, with reference counts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sagellm.core.errors import BlockError, EngineError, OutOfBlocksError
from sagellm.core.ids import BlockId, SequenceId

Evictor = Callable[[int], int]
"""Called with a number of blocks wanted; frees what it can and returns how many it freed."""


class BlockAllocationRequest(NamedTuple):
    """A sequence's request for blocks. Larger priorities are more urgent."""

    num_blocks: int
    sequence_id: str
    priority: int = 0


@dataclass(frozen=True, kw_only=True)
class BlockInfo:
    """One allocated block, as it is now."""

    block_id: BlockId
    sequence_id: SequenceId  # who allocated it
    priority: int
    ref_count: int
    last_access_time: float  # seconds on the pool's clock


@dataclass(frozen=True, kw_only=True)
class KVPoolMetrics:
    """Counts of a pool, in blocks."""

    total_blocks: int = 0
    num_free_blocks: int = 0
    num_shared_blocks: int = 0  # with more than one reference
    num_allocations: int = 0  # calls that got blocks: of allocate, and of copy_on_write if it took one
    num_failed_allocations: int = 0
    num_evicted_blocks: int = 0  # freed through evict_if_needed
    external_fragmentation: float = 0.0
    largest_free_run: int = 0
    num_misplaced_blocks: int = 0  # in use where a compacted pool has none; compaction moves them
    num_moved_blocks: int = 0  # by `move`, so far

    @property
    def num_used_blocks(self) -> int:
        """Blocks with at least one reference."""
        return self.total_blocks - self.num_free_blocks


class KVPoolProtocol(ABC):
    """Hands out KV blocks and counts their references.

    Providers are called as `factory(total_blocks, block_size, allocator=..., clock=...)`. Each
    block is free or has a reference count of at least one; sequences and the prefix cache each
    hold references. Every call either succeeds completely or changes nothing. An id that is given
    twice in one call counts twice. Calls may come from many threads. The pool knows no eviction
    policy: `evict_if_needed` calls the configured evictor, holding no lock, so that the
    evictor may call `free`.
    """

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.total_blocks:,} blocks of {self.block_size} tokens>"

    @property
    @abstractmethod
    def total_blocks(self) -> int:
        """Blocks in the pool, free or not."""

    @property
    @abstractmethod
    def block_size(self) -> int:
        """Tokens in a block."""

    @property
    @abstractmethod
    def block_info(self) -> Mapping[BlockId, BlockInfo]:
        """The allocated blocks, a live view; KeyError for a free block."""

    @abstractmethod
    def allocate(self, request: BlockAllocationRequest) -> list[BlockId]:
        """Hand out blocks with one reference each.

        Raises OutOfBlocksError when fewer are free, BlockError when the size is below one.
        """

    def allocate_each(self, sequence_ids: Sequence[str], priorities: Sequence[int]) -> list[BlockId]:
        """Hand out one block with one reference to each of several sequences, in their order.

        Counts as one call of `allocate` for each, which it is by default. Raises OutOfBlocksError, and gives
        none, when fewer are free.
        """
        block_ids: list[BlockId] = []
        try:
            for sequence_id, priority in zip(sequence_ids, priorities, strict=True):
                block_ids += self.allocate(BlockAllocationRequest(1, sequence_id, priority))
        except BaseException:
            self.free(block_ids)
            raise
        return block_ids

    @abstractmethod
    def share(self, block_ids: Sequence[int]) -> None:
        """Add a reference to each block. Raises BlockError for one that is free or unknown."""

    @abstractmethod
    def copy_on_write(self, block_id: BlockId, sequence_id: str, priority: int = 0) -> BlockId:
        """Return a block that the caller, who holds a reference of `block_id`, may write to alone.

        With one reference that is the block itself, and nothing changes. With more it is a fresh
        block, held as if allocated, and `block_id` loses one reference atomically; the
        caller copies the bytes before anything else can free the old block. Raises OutOfBlocksError
        when none is free, BlockError for a block that is free or unknown.
        """

    @abstractmethod
    def free(self, block_ids: Sequence[int]) -> int:
        """Drop one reference of each block and return how many became free.

        Raises BlockError for an id that is unknown or has no reference left to drop.
        """

    def plan_moves(self, max_blocks: int) -> list[tuple[BlockId, BlockId]]:
        """Return up to `max_blocks` moves, (from, to), that bring the free blocks together.

        The used blocks with the highest ids move to the free blocks with the lowest, in the same
        order. Empty when the free blocks are one run at the end. Changes nothing; may cost
        O(total_blocks). Raises EngineError by default: this pool moves nothing.
        """
        raise EngineError(f"{type(self).__name__} cannot move blocks; name another pool in kv.pool")

    def move(self, moves: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Move the first block of each pair to the second; the first is then free.

        References, holder and times move too. The caller has copied the KV, and replaces all
        occurrences of the old ids before doing anything else. Raises BlockError, and changes nothing, unless
        the first blocks are allocated, the second ones free, and each given once.
        """
        raise EngineError(f"{type(self).__name__} cannot move blocks; name another pool in kv.pool")

    @abstractmethod
    def get_free_blocks(self) -> int:
        """Return how many blocks are free."""

    @abstractmethod
    def set_evictor(self, evictor: Evictor | None) -> None:
        """Set the function that frees blocks on demand."""

    @abstractmethod
    def evict_if_needed(self, num_blocks: int = 1) -> int:
        """Have blocks evicted until `num_blocks` are free; return how many are then free.

        Stops early when the evictor frees nothing more, and evicts nothing at all if more
        blocks are wanted than the pool has.
        """

    @abstractmethod
    def metrics(self) -> KVPoolMetrics:
        """Return the present counts."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise AssertionError if the bookkeeping contradicts itself."""


class NullKVPool(KVPoolProtocol):
    """A pool of no blocks."""

    def __init__(self, total_blocks: int = 0, block_size: int = 16, **_: object) -> None:
        del total_blocks
        self._block_size = block_size

    @property
    def total_blocks(self) -> int:
        """Always 0."""
        return 0

    @property
    def block_size(self) -> int:
        """The value given at construction."""
        return self._block_size

    @property
    def block_info(self) -> Mapping[BlockId, BlockInfo]:
        """Always empty."""
        return {}

    def allocate(self, request: BlockAllocationRequest) -> list[BlockId]:
        """Refuse: there is nothing to give."""
        needed = request.num_blocks
        if type(needed) is not int or needed < 1:
            raise BlockError(f"{needed!r} blocks asked for; ask for at least 1")
        raise OutOfBlocksError(f"{needed} blocks asked for, this pool has none", needed=needed, available=0)

    def share(self, block_ids: Sequence[int]) -> None:
        """Accept only an empty list."""
        if block_ids:
            raise BlockError(f"blocks {list(block_ids)} are not allocated")

    def copy_on_write(self, block_id: BlockId, sequence_id: str, priority: int = 0) -> BlockId:
        """Refuse: there is no such block."""
        del sequence_id, priority
        raise BlockError(f"block {block_id!r} is not allocated")

    def free(self, block_ids: Sequence[int]) -> int:
        """Accept only an empty list."""
        if block_ids:
            raise BlockError(f"blocks {list(block_ids)} are not allocated")
        return 0

    def plan_moves(self, max_blocks: int) -> list[tuple[BlockId, BlockId]]:
        """Return no moves."""
        return []

    def move(self, moves: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Accept only an empty list."""
        if moves:
            raise BlockError(f"blocks {[source for source, _ in moves]} are not allocated")

    def get_free_blocks(self) -> int:
        """Always 0."""
        return 0

    def set_evictor(self, evictor: Evictor | None) -> None:
        """Ignore it: there is nothing to evict."""

    def evict_if_needed(self, num_blocks: int = 1) -> int:
        """Always 0."""
        return 0

    def metrics(self) -> KVPoolMetrics:
        """Return zeros."""
        return KVPoolMetrics()

    def check_integrity(self) -> None:
        """Nothing can be wrong."""
