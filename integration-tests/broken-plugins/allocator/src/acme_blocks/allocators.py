"""A good allocator, and five that each do one thing otherwise."""

from collections.abc import Sequence
from typing import ClassVar

from sagellm.core import AllocatorMetrics, BlockError, BlockId, KVAllocatorProtocol, OutOfBlocksError


class Stack(KVAllocatorProtocol):
    """Hands out what was freed last. This one keeps the contract."""

    def __init__(self, total_blocks: int) -> None:
        self._total = total_blocks
        self._free = [BlockId(block_id) for block_id in range(total_blocks)]
        self._held: set[int] = set()

    def allocate(self, num_blocks: int) -> list[BlockId]:
        self._refuse(num_blocks)
        return self._take(num_blocks)

    def free(self, block_ids: Sequence[BlockId]) -> None:
        if not self.all_allocated(block_ids) or len(set(block_ids)) < len(block_ids):
            raise BlockError(f"blocks {list(block_ids)} are not all held")
        self._give_back(block_ids)

    def all_allocated(self, block_ids: Sequence[BlockId]) -> bool:
        return all(type(block_id) is int and block_id in self._held for block_id in block_ids)

    @property
    def num_free_blocks(self) -> int:
        return self._total - len(self._held)

    def metrics(self) -> AllocatorMetrics:
        longest = run = 0
        for block_id in range(self._total):
            run = 0 if block_id in self._held else run + 1
            longest = max(longest, run)
        return AllocatorMetrics(
            total_blocks=self._total, num_free_blocks=self.num_free_blocks, largest_free_run=longest
        )

    def check_integrity(self) -> None:
        assert len(self._free) == self.num_free_blocks, "the list of free blocks has another length"

    def _refuse(self, num_blocks: int) -> None:
        if type(num_blocks) is not int or num_blocks < 1:
            raise BlockError(f"{num_blocks!r} blocks asked for")
        if num_blocks > self.num_free_blocks:
            raise OutOfBlocksError(
                f"{num_blocks} blocks asked for, {self.num_free_blocks} are free",
                needed=num_blocks,
                available=self.num_free_blocks,
            )

    def _take(self, num_blocks: int) -> list[BlockId]:
        taken = [self._free.pop() for _ in range(num_blocks)]
        self._held.update(taken)
        return taken

    def _give_back(self, block_ids: Sequence[BlockId]) -> None:
        self._held.difference_update(block_ids)
        self._free += block_ids


class Trusting(Stack):
    """Believes that what it is given back is held."""

    def free(self, block_ids: Sequence[BlockId]) -> None:
        known = [type(block_id) is int and 0 <= block_id < self._total for block_id in block_ids]
        if not all(known):
            raise BlockError(f"blocks {list(block_ids)} do not all exist")
        self._give_back(dict.fromkeys(block_id for block_id in block_ids if block_id in self._held))


class Generous(Stack):
    """Gives as many as there are when there are too few."""

    def allocate(self, num_blocks: int) -> list[BlockId]:
        if type(num_blocks) is int and num_blocks > self.num_free_blocks:
            return self._take(self.num_free_blocks)
        return super().allocate(num_blocks)


class Runs(Stack):
    """Keeps runs of free blocks; where a block closes a gap, the run on its right stays on the books."""

    def __init__(self, total_blocks: int) -> None:
        super().__init__(total_blocks)
        self._lengths: dict[int, int] = {}  # by the first block of a run
        self._firsts: dict[int, int] = {}  # by the block behind a run
        if total_blocks:
            self._add(0, total_blocks)

    def check_integrity(self) -> None:
        """There is nothing to check."""

    def _add(self, first: int, length: int) -> None:
        self._lengths[first], self._firsts[first + length] = length, first

    def _take(self, num_blocks: int) -> list[BlockId]:
        taken: list[BlockId] = []
        while len(taken) < num_blocks:
            first, length = self._lengths.popitem()
            self._firsts.pop(first + length, None)
            size = min(length, num_blocks - len(taken))
            taken += (BlockId(block_id) for block_id in range(first, first + size))
            if size < length:
                self._add(first + size, length - size)
        self._held.update(taken)
        return taken

    def _give_back(self, block_ids: Sequence[BlockId]) -> None:
        self._held.difference_update(block_ids)
        for block_id in block_ids:
            length = 1 + self._lengths.get(block_id + 1, 0)
            left = self._firsts.pop(block_id, None)
            if left is not None:
                self._add(left, self._lengths[left] + length)  # and what of block_id + 1?
            else:
                self._lengths.pop(block_id + 1, None)
                self._add(block_id, length)


class Common(Stack):
    """Has its list of free blocks in the class."""

    _free_of_all: ClassVar[dict[int, list[BlockId]]] = {}

    def __init__(self, total_blocks: int) -> None:
        super().__init__(total_blocks)
        self._free = self._free_of_all.setdefault(total_blocks, self._free)

    def check_integrity(self) -> None:
        """There is nothing to check."""

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)


class Lowest(Stack):
    """Sorts all free blocks for the lowest ones."""

    def _take(self, num_blocks: int) -> list[BlockId]:
        self._free.sort()
        taken, self._free = self._free[:num_blocks], self._free[num_blocks:]
        self._held.update(taken)
        return taken
