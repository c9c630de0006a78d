"""The pool: blocks from an allocator, each with a reference count and a holder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import repeat
from threading import RLock
from typing import TypeAlias, cast

from sagellm.core import (
    BlockAllocationRequest,
    BlockError,
    BlockId,
    BlockInfo,
    Clock,
    ConfigError,
    Evictor,
    KVAllocatorProtocol,
    KVPoolMetrics,
    KVPoolProtocol,
    OutOfBlocksError,
    SequenceId,
    SystemClock,
    require_object,
)
from sagellm.kvmgr.kv_pool.free_list import FreeListAllocator
from sagellm.kvmgr.kv_pool.refusal import no_ids, no_number, refusal, shortage

_Grant: TypeAlias = tuple[str, int, int]
"""A block's sequence, priority and last access in ns. `zip` makes them in a sixth of a class's time."""

_NOBODY: _Grant = ("", 0, 0)


class PagedKVPool(KVPoolProtocol):
    """Hands out blocks of equal size and counts their references.

    Only the allocator knows which blocks are free. The pool adds the sequence that allocated each block, and
    a count for blocks with more than one reference; most have one and cost nothing to count.
    `allocate` and `free` cost about 2 µs + 0.05 µs per block, `share` and the freeing of shared
    blocks about 0.1 µs per block. One lock guards everything.
    """

    def __init__(
        self,
        total_blocks: int = 10_000,
        block_size: int = 16,
        *,
        allocator: KVAllocatorProtocol | None = None,
        clock: Clock | None = None,
    ) -> None:
        for key, value in (("kv.num_blocks", total_blocks), ("kv.block_size", block_size)):
            if type(value) is not int or value < 1:
                raise ConfigError(f"{key} is {value!r}; it must be an int >= 1")
        if allocator is not None:
            require_object("allocator", allocator, KVAllocatorProtocol, "kv_allocator")
        self._total_blocks = total_blocks
        self._block_size = block_size
        self._allocator = FreeListAllocator(total_blocks) if allocator is None else allocator
        self._clock = SystemClock() if clock is None else clock
        _check_fresh(self._allocator, total_blocks)
        self._lock = RLock()
        self._grants = [_NOBODY] * total_blocks  # by block; stale where it is free
        self._extra_refs: dict[BlockId, int] = {}  # references beyond the first, if any
        self._evictor: Evictor | None = None
        self._num_allocations = 0
        self._num_failed_allocations = 0
        self._num_evicted_blocks = 0
        self._num_moved_blocks = 0

    def __repr__(self) -> str:
        num_free = self._allocator.num_free_blocks  # without the lock: a debugger may ask while it is held
        sizes = f"{num_free:,} of {self._total_blocks:,} blocks of {self._block_size} tokens free"
        return f"<{type(self).__name__} {sizes}, {type(self._allocator).__name__}>"

    @property
    def total_blocks(self) -> int:
        """Blocks in the pool, free or not."""
        return self._total_blocks

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self._block_size

    @property
    def block_info(self) -> Mapping[BlockId, BlockInfo]:
        """The allocated blocks, a live view; KeyError for a free block."""
        return BlockView(self._find, self._total_blocks, lambda: self._total_blocks - self.get_free_blocks())

    def allocate(self, request: BlockAllocationRequest) -> list[BlockId]:
        """Hand out blocks with one reference each, in ascending order as long as they are fresh.

        Raises OutOfBlocksError when fewer are free, BlockError when the size is below one.
        """
        num_blocks = request.num_blocks
        if type(num_blocks) is not int or num_blocks < 1:
            raise no_number(num_blocks, f" by sequence {request.sequence_id!r}")
        grant = request.sequence_id, request.priority, self._clock.now_ns()
        with self._lock:
            try:
                block_ids = self._allocator.allocate(num_blocks)
            except OutOfBlocksError as error:
                raise self._failed(num_blocks, f" by sequence {request.sequence_id!r}") from error
            grants = self._grants
            for block_id in block_ids:
                grants[block_id] = grant
            self._num_allocations += 1
            return block_ids

    def allocate_each(self, sequence_ids: Sequence[str], priorities: Sequence[int]) -> list[BlockId]:
        """Hand out one block with one reference to each of these sequences, in one piece of the allocator's.

        Raises OutOfBlocksError when fewer are free. About 0.1 µs per block.
        """
        num_blocks = len(sequence_ids)
        granted = list(zip(sequence_ids, priorities, repeat(self._clock.now_ns(), num_blocks), strict=True))
        if not granted:
            return []
        with self._lock:
            try:
                block_ids = self._allocator.allocate(num_blocks)
            except OutOfBlocksError as error:
                raise self._failed(num_blocks, f" by {num_blocks} sequences") from error
            grants = self._grants
            for block_id, grant in zip(block_ids, granted, strict=True):
                grants[block_id] = grant
            self._num_allocations += num_blocks
        return block_ids

    def share(self, block_ids: Sequence[int]) -> None:
        """Add a reference to each block. Raises BlockError for one that is free or unknown."""
        try:  # a copy, so that the caller cannot change it during the call
            ids = cast("list[BlockId]", list(block_ids))
        except TypeError:
            raise no_ids(block_ids) from None
        extra_refs, grants = self._extra_refs, self._grants
        now_ns = self._clock.now_ns()
        previous = touched = _NOBODY
        with self._lock:
            if not self._allocator.all_allocated(ids):
                raise self._refusal(ids)
            for block_id in ids:
                extra_refs[block_id] = extra_refs.get(block_id, 0) + 1
                grant = grants[block_id]
                if grant is not previous:  # neighbours are mostly from the same allocate call
                    previous, touched = grant, (grant[0], grant[1], now_ns)
                grants[block_id] = touched

    def copy_on_write(self, block_id: BlockId, sequence_id: str, priority: int = 0) -> BlockId:
        """Return the block itself if it has one reference, else a fresh one for one of its references.

        Raises OutOfBlocksError when none is free, BlockError for a block that is free or unknown.
        """
        request = BlockAllocationRequest(num_blocks=1, sequence_id=sequence_id, priority=priority)
        with self._lock:
            num_refs = self._num_refs(block_id)
            if not num_refs:
                raise self._refusal([block_id])
            if num_refs == 1:
                return block_id
            (fresh,) = self.allocate(request)
            self._drop_extra_refs([block_id])
        return fresh

    def free(self, block_ids: Sequence[int]) -> int:
        """Drop one reference of each block and return how many became free.

        Raises BlockError for an id that is unknown or has no reference left to drop.
        """
        try:  # a copy, so that the caller cannot change it during the call
            ids = cast("list[BlockId]", list(block_ids))
        except TypeError:
            raise no_ids(block_ids) from None
        with self._lock:
            if self._extra_refs and not _is_disjoint(self._extra_refs, ids):
                ids = self._drop_extra_refs(ids)
            try:
                self._allocator.free(ids)
            except BlockError as error:
                raise self._refusal(ids) from error
        return len(ids)

    def plan_moves(self, max_blocks: int) -> list[tuple[BlockId, BlockId]]:
        """Return which blocks to move where, both ascending, to make the free blocks one run at the end."""
        with self._lock:
            occupancy = self._allocator.occupancy()
        num_used = occupancy.count(1)
        num_moves = min(max_blocks, occupancy.count(1, num_used))
        sources: list[BlockId] = []
        targets: list[BlockId] = []
        above, below = self._total_blocks, -1
        for _ in range(num_moves):
            above, below = occupancy.rfind(1, 0, above), occupancy.find(0, below + 1)
            sources.append(BlockId(above))
            targets.append(BlockId(below))
        return list(zip(reversed(sources), targets, strict=True))

    def move(self, moves: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Give the first blocks' references and holders to the second ones, and free the first ones.

        Raises BlockError unless the first are allocated, the second are free, and each is given once.
        """
        moves = list(moves)
        sources, targets = [source for source, _ in moves], [target for _, target in moves]
        extra_refs, grants, allocator = self._extra_refs, self._grants, self._allocator
        with self._lock:
            if not allocator.all_allocated(sources) or len(set(sources)) < len(sources):
                raise BlockError(f"not all of blocks {sources[:8]} are allocated and given once; move such")
            allocator.claim(targets)
            try:
                allocator.free(sources)
            except BaseException:
                allocator.free(targets)
                raise
            for source, target in moves:
                grants[target] = grants[source]
                if extra := extra_refs.pop(source, 0):
                    extra_refs[target] = extra
            self._num_moved_blocks += len(moves)

    def get_free_blocks(self) -> int:
        """Return how many blocks are free."""
        with self._lock:
            return self._allocator.num_free_blocks

    def set_evictor(self, evictor: Evictor | None) -> None:
        """Set the function that frees blocks on demand. It is called without the pool's lock."""
        self._evictor = evictor

    def evict_if_needed(self, num_blocks: int = 1) -> int:
        """Have blocks evicted until `num_blocks` are free; return how many are then free.

        The evictor is called again as long as the number of free blocks grows. Raises BlockError
        for a negative number.
        """
        if type(num_blocks) is not int or num_blocks < 0:
            raise BlockError(f"{num_blocks!r} free blocks wanted; give an int >= 0")
        num_free = self.get_free_blocks()
        if num_blocks > self._total_blocks:  # cannot be met, so evict nothing
            return num_free
        while num_free < num_blocks and (evictor := self._evictor) is not None:
            num_evicted = evictor(num_blocks - num_free)
            before, num_free = num_free, self.get_free_blocks()
            with self._lock:
                self._num_evicted_blocks += num_evicted
            if num_free <= before:
                break
        return num_free

    def metrics(self) -> KVPoolMetrics:
        """Return the present counts. Costs what the allocator's metrics cost."""
        with self._lock:
            allocator = self._allocator.metrics()
            occupancy = self._allocator.occupancy()
            return KVPoolMetrics(
                total_blocks=self._total_blocks,
                num_free_blocks=allocator.num_free_blocks,
                num_shared_blocks=len(self._extra_refs),
                num_allocations=self._num_allocations,
                num_failed_allocations=self._num_failed_allocations,
                num_evicted_blocks=self._num_evicted_blocks,
                external_fragmentation=allocator.external_fragmentation,
                largest_free_run=allocator.largest_free_run,
                num_misplaced_blocks=occupancy.count(1, occupancy.count(1)),
                num_moved_blocks=self._num_moved_blocks,
            )

    def check_integrity(self) -> None:
        """Raise AssertionError if the bookkeeping contradicts itself."""
        with self._lock:
            self._allocator.check_integrity()
            shared = list(self._extra_refs)
            assert self._allocator.all_allocated(shared), "a free block has references"
            assert all(count > 0 for count in self._extra_refs.values()), (
                "a count of references fell below one"
            )
            assert len(self._grants) == self._total_blocks, "the table of grants changed its length"

    def _failed(self, num_blocks: int, by: str) -> OutOfBlocksError:
        """Count a call that got no blocks, and return its error. Called with the lock held."""
        self._num_failed_allocations += 1
        return shortage(num_blocks, self._allocator.num_free_blocks, self._total_blocks, by)

    def _drop_extra_refs(self, block_ids: list[BlockId]) -> list[BlockId]:
        """Drop references of blocks that have more than one, and return those blocks that had one."""
        extra_refs = self._extra_refs
        if not self._allocator.all_allocated(block_ids):
            raise self._refusal(block_ids)
        if len(set(block_ids)) < len(block_ids):
            for block_id, count in Counter(block_ids).items():
                if count > extra_refs.get(block_id, 0) + 1:
                    raise self._refusal(block_ids)
        last: list[BlockId] = []
        for block_id in block_ids:
            extra = extra_refs.get(block_id, 0)
            if extra > 1:
                extra_refs[block_id] = extra - 1
            elif extra:
                del extra_refs[block_id]
            else:
                last.append(block_id)
        return last

    def _find(self, block_id: object) -> BlockInfo | None:
        if type(block_id) is not int or not 0 <= block_id < self._total_blocks:
            return None
        found = BlockId(block_id)
        with self._lock:
            (sequence_id, priority, accessed_ns), ref_count = self._grants[found], self._num_refs(found)
        if not ref_count:
            return None
        return BlockInfo(
            block_id=found,
            sequence_id=SequenceId(sequence_id),
            priority=priority,
            ref_count=ref_count,
            last_access_time=accessed_ns / 1e9,
        )

    def _num_refs(self, block_id: BlockId) -> int:
        if not self._allocator.all_allocated([block_id]):
            return 0
        return self._extra_refs.get(block_id, 0) + 1

    def _refusal(self, block_ids: list[BlockId]) -> BlockError:
        """Say what is wrong with ids that were refused. Called with the lock held."""
        return refusal(block_ids, self._total_blocks, self._num_refs)


GPUKVPool = PagedKVPool
"""Another name for the pool; where its blocks lie is up to the engine."""


def _is_disjoint(extra_refs: Mapping[BlockId, int], block_ids: list[BlockId]) -> bool:
    try:
        return extra_refs.keys().isdisjoint(block_ids)
    except TypeError:  # something unhashable; the allocator will refuse it
        return True


def _check_fresh(allocator: KVAllocatorProtocol, total_blocks: int) -> None:
    state = allocator.metrics()
    if (state.total_blocks, state.num_free_blocks) != (total_blocks, total_blocks):
        raise ConfigError(
            f"kv.num_blocks is {total_blocks}, but the allocator has {state.num_free_blocks} of "
            f"{state.total_blocks} blocks free; give each pool a new allocator of its own size"
        )


class BlockView(Mapping[BlockId, BlockInfo]):
    """Reads a pool block by block, always in its current state.

    `find` returns None for a free or invalid id. Nothing is copied and no lock is
    held between two steps of an iteration: blocks freed by another thread meanwhile are skipped.
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
