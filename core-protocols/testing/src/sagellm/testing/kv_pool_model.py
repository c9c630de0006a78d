"""Random operations on a KV pool, checked against a model."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from sagellm.core.errors import BlockError, OutOfBlocksError
from sagellm.core.ids import BlockId, SequenceId
from sagellm.core.protocols.kv_pool import BlockAllocationRequest, KVPoolProtocol


def ask(num_blocks: int, sequence_id: str = "a", priority: int = 0) -> BlockAllocationRequest:
    """Make an allocation request."""
    return BlockAllocationRequest(
        num_blocks=num_blocks, sequence_id=SequenceId(sequence_id), priority=priority
    )


class KVPoolMachine:
    """Draws random operations and knows the correct result of each.

    Several may work on one pool, each in its own thread, if they share one dict of
    `owners`. None touches another's blocks, so each one's counts are exact; only the number of
    free blocks is unknown to all of them.
    """

    def __init__(
        self, pool: KVPoolProtocol, rng: random.Random, owners: dict[BlockId, KVPoolMachine] | None = None
    ) -> None:
        self.pool = pool
        self.rng = rng
        self.refs: Counter[BlockId] = Counter()  # of the blocks of this machine
        self.holders: dict[BlockId, str] = {}
        self._is_alone = owners is None
        self._owners: dict[BlockId, KVPoolMachine] = {} if owners is None else owners

    def step(self) -> None:
        """Perform one operation, right or wrong, and check its outcome."""
        operations = [self.allocate, self.allocate_each, self.share, self.copy_on_write, self.move, self.free]
        self.rng.choice([*operations, self.free])()
        if self._is_alone:
            assert self.pool.get_free_blocks() == self.pool.total_blocks - len(self.refs)

    def allocate(self) -> None:
        """Ask for up to a dozen blocks."""
        size, holder = self.rng.randint(0, 12), f"s{self.rng.randrange(100)}"
        if not size:
            with pytest.raises(BlockError):
                self.pool.allocate(ask(size, holder))
            return
        try:
            block_ids = self.pool.allocate(ask(size, holder))
        except OutOfBlocksError:
            assert self._may_lack(size), "blocks were refused though enough were free"
            return
        assert len(block_ids) == size
        self._claim(block_ids, holder)

    def allocate_each(self) -> None:
        """Ask for a block for each of several sequences."""
        holders = [f"s{self.rng.randrange(100)}" for _ in range(self.rng.randint(0, 6))]
        try:
            block_ids = self.pool.allocate_each(holders, [0] * len(holders))
        except OutOfBlocksError:
            assert self._may_lack(len(holders)), "blocks were refused though enough were free"
            return
        assert len(block_ids) == len(holders)
        self._claim(block_ids, *holders)

    def share(self) -> None:
        """Share some blocks that are held, sometimes with one that is not."""
        block_ids = self._some()
        if self.rng.random() < 0.1:
            with pytest.raises(BlockError):
                self.pool.share([*block_ids, self._wrong_id()])
        else:
            self.pool.share(block_ids)
            self.refs.update(block_ids)

    def copy_on_write(self) -> None:
        """Request a writable block in place of a held one, or of a wrong one."""
        holder = SequenceId(f"s{self.rng.randrange(100)}")
        if not self.refs or self.rng.random() < 0.1:
            with pytest.raises(BlockError):
                self.pool.copy_on_write(self._wrong_id(), holder)
            return
        block_id = self.rng.choice(list(self.refs))
        try:
            mine = self.pool.copy_on_write(block_id, holder)
        except OutOfBlocksError:
            assert self.refs[block_id] > 1, "a block of one reference needs no other"
            assert self._may_lack(1), "a block was refused though one was free"
            return
        if self.refs[block_id] == 1:
            assert mine == block_id
        else:
            self._claim([mine], holder)
            self.refs[block_id] -= 1

    def move(self) -> None:
        """Move some held blocks to others, which may be held too, or unknown."""
        sources = list(dict.fromkeys(self._some()))
        targets = [BlockId(self.rng.randrange(-1, self.pool.total_blocks + 1)) for _ in sources]
        if self._is_alone and self.rng.random() < 0.5:
            moves = self.pool.plan_moves(self.rng.randint(0, 8))
            sources, targets = [source for source, _ in moves], [target for _, target in moves]
        owners = [self._owners.pop(source) for source in sources]  # before another machine can get them
        try:
            self.pool.move(list(zip(sources, targets, strict=True)))
        except BlockError:
            self._owners.update(zip(sources, owners, strict=True))
            is_free = self.refs.keys().isdisjoint(targets) and len(set(targets)) == len(targets)
            is_known = all(0 <= target < self.pool.total_blocks for target in targets)
            assert not (self._is_alone and is_free and is_known), "a move to free blocks was refused"
            return
        assert self.refs.keys().isdisjoint(targets), "a block was moved to one that is held"
        for source, target in zip(sources, targets, strict=True):
            num_refs, holder = self.refs.pop(source), self.holders[source]
            self._claim([target], holder)
            self.refs[target] = num_refs

    def free(self) -> None:
        """Drop references, sometimes more than there are."""
        block_ids = self._some()
        drops = Counter(block_ids)
        if self.rng.random() < 0.1:
            with pytest.raises(BlockError):
                self.pool.free([*block_ids, self._wrong_id()])
        elif any(number > self.refs[block_id] for block_id, number in drops.items()):
            with pytest.raises(BlockError):
                self.pool.free(block_ids)
        else:
            gone = [block_id for block_id, number in drops.items() if number == self.refs[block_id]]
            for block_id in gone:  # before another machine can get it
                del self._owners[block_id]
            self.refs.subtract(drops)
            for block_id in gone:
                del self.refs[block_id]
            assert self.pool.free(block_ids) == len(gone)

    def _claim(self, block_ids: Sequence[BlockId], *holders: str) -> None:
        """Note who got blocks: one for all of them, or one for each."""
        assert len(set(block_ids)) == len(block_ids)
        for block_id in block_ids:
            assert block_id not in self.refs, "a block was handed out that is held"
            assert self._owners.setdefault(block_id, self) is self, "two threads hold one block"
        self.refs.update(block_ids)
        self.holders.update(
            zip(block_ids, holders * len(block_ids) if len(holders) == 1 else holders, strict=True)
        )

    def _may_lack(self, num_blocks: int) -> bool:
        return not self._is_alone or num_blocks > self.pool.total_blocks - len(self.refs)

    def _some(self) -> list[BlockId]:
        held = list(self.refs)
        return self.rng.choices(held, k=self.rng.randint(0, 8)) if held else []

    def _wrong_id(self) -> BlockId:
        wrong = {-1, self.pool.total_blocks}
        if self._is_alone:  # otherwise another machine may take a free block at any moment
            wrong |= set(range(self.pool.total_blocks)) - set(self.refs)
        return BlockId(self.rng.choice(sorted(wrong)))


def compare(pool: KVPoolProtocol, machines: Sequence[KVPoolMachine]) -> None:
    """Compare the whole pool with what all its machines hold together."""
    refs: Counter[BlockId] = Counter()
    holders: dict[BlockId, str] = {}
    for machine in machines:
        assert refs.keys().isdisjoint(machine.refs), "two machines hold one block"
        refs.update(machine.refs)
        holders.update({block_id: machine.holders[block_id] for block_id in machine.refs})
    infos = dict(pool.block_info)
    assert {block_id: info.ref_count for block_id, info in infos.items()} == refs
    assert {block_id: info.sequence_id for block_id, info in infos.items()} == holders
    assert pool.metrics().num_shared_blocks == sum(count > 1 for count in refs.values())
    assert pool.get_free_blocks() == pool.total_blocks - len(refs)
