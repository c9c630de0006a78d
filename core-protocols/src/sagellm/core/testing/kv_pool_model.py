"""Random operations on a KV pool, beside a model of what each must do."""

from __future__ import annotations

import random
from collections import Counter

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
    """Draws operations at random and knows what each must do."""

    def __init__(self, pool: KVPoolProtocol, rng: random.Random) -> None:
        self.pool = pool
        self.rng = rng
        self.refs: Counter[BlockId] = Counter()  # of allocated blocks
        self.holders: dict[BlockId, str] = {}

    def step(self) -> None:
        """Perform one operation, right or wrong, and check its outcome."""
        self.rng.choice([self.allocate, self.share, self.free, self.free])()
        assert self.pool.get_free_blocks() == self.pool.total_blocks - len(self.refs)

    def allocate(self) -> None:
        """Ask for up to a dozen blocks."""
        size, holder = self.rng.randint(0, 12), f"s{self.rng.randrange(100)}"
        num_free = self.pool.total_blocks - len(self.refs)
        if not 1 <= size <= num_free:
            with pytest.raises(OutOfBlocksError if size else BlockError):
                self.pool.allocate(ask(size, holder))
            return
        block_ids = self.pool.allocate(ask(size, holder))
        assert len(set(block_ids)) == size
        assert self.refs.keys().isdisjoint(block_ids)
        self.refs.update(block_ids)
        self.holders.update(dict.fromkeys(block_ids, holder))

    def share(self) -> None:
        """Share some blocks that are held, sometimes with one that is not."""
        block_ids = self._some()
        if self.rng.random() < 0.1:
            with pytest.raises(BlockError):
                self.pool.share([*block_ids, self._free_id()])
        else:
            self.pool.share(block_ids)
            self.refs.update(block_ids)

    def free(self) -> None:
        """Drop references, sometimes more than there are."""
        block_ids = self._some()
        if self.rng.random() < 0.1:
            with pytest.raises(BlockError):
                self.pool.free([*block_ids, self._free_id()])
        elif any(count > self.refs[block_id] for block_id, count in Counter(block_ids).items()):
            with pytest.raises(BlockError):
                self.pool.free(block_ids)
        else:
            before = len(self.refs)
            self.refs = +(self.refs - Counter(block_ids))
            assert self.pool.free(block_ids) == before - len(self.refs)

    def compare(self) -> None:
        """Compare the whole pool with the model."""
        infos = dict(self.pool.block_info)
        assert {block_id: info.ref_count for block_id, info in infos.items()} == self.refs
        assert all(info.sequence_id == self.holders[block_id] for block_id, info in infos.items())
        shared = sum(count > 1 for count in self.refs.values())
        assert self.pool.metrics().num_shared_blocks == shared

    def _some(self) -> list[BlockId]:
        held = list(self.refs)
        return self.rng.choices(held, k=self.rng.randint(0, 8)) if held else []

    def _free_id(self) -> BlockId:
        free = set(range(-1, self.pool.total_blocks + 1)) - set(self.refs)
        return BlockId(self.rng.choice(sorted(free)))
