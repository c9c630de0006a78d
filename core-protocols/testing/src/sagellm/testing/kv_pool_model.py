"""Operations on a KV pool and a model of it: random ones, alone or in threads, or those of hypothesis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sagellm.core.errors import BlockError, OutOfBlocksError
from sagellm.core.ids import BlockId, SequenceId
from sagellm.core.protocols.kv_pool import BlockAllocationRequest, KVPoolProtocol

_PICKS = st.lists(st.integers(0, 15), max_size=6)
_HOLDERS = st.sampled_from("ab")
_IDS = st.integers(-1, 16)  # of a pool of 16 blocks, and one on either side


def ask(num_blocks: int, sequence_id: str = "a", priority: int = 0) -> BlockAllocationRequest:
    """Make an allocation request."""
    return BlockAllocationRequest(
        num_blocks=num_blocks, sequence_id=SequenceId(sequence_id), priority=priority
    )


class KVPoolMachine(RuleBasedStateMachine):
    """Makes valid and invalid calls to a pool, and knows the correct result of each.

    Several may work on one pool, each in its own thread, if they share one dict of
    `owners`. None touches another's blocks, so each one's counts are exact; only the number of
    free blocks is unknown to all of them.
    """

    def __init__(self, pool: KVPoolProtocol, owners: dict[BlockId, KVPoolMachine] | None = None) -> None:
        super().__init__()
        self.pool = pool
        self.refs: Counter[BlockId] = Counter()  # of the blocks of this machine
        self.holders: dict[BlockId, str] = {}
        self._is_alone = owners is None
        self._owners: dict[BlockId, KVPoolMachine] = {} if owners is None else owners

    def step(self, rng: Random) -> None:
        """Perform one operation, right or wrong, with random arguments, and check its outcome."""
        picks = [rng.randrange(1 << 16) for _ in range(rng.randint(0, 8))]
        holder, total = f"s{rng.randrange(100)}", self.pool.total_blocks
        operation = rng.randrange(8)
        if operation == 0:
            self.allocate(size=rng.randint(0, 12), holder=holder)
        elif operation == 1:
            self.allocate_each(holders=[holder, *map(str, picks[:5])])
        elif operation == 2:
            self.share(picks=picks)
        elif operation == 3:
            self.copy_on_write(pick=rng.randrange(1 << 16), holder=holder)
        elif operation == 4 and rng.random() < 0.5:
            self.compact(size=rng.randint(0, 8))
        elif operation == 4:
            self.move(picks=picks, to=[rng.randrange(-1, total + 1) for _ in picks])
        elif operation == 5 and rng.random() < 0.3:
            self.name_a_free_block(picks=picks, wrong=rng.randrange(-1, total + 1))
        else:
            self.free(picks=picks)
        if self._is_alone:
            assert self.pool.get_free_blocks() == total - len(self.refs)

    @rule(size=st.integers(0, 6), holder=_HOLDERS)
    def allocate(self, size: int, holder: str) -> None:
        """Request some blocks, sometimes none or more than are free."""
        if not size:
            with pytest.raises(BlockError):
                self.pool.allocate(ask(size, holder))
            return
        try:
            block_ids = self.pool.allocate(ask(size, holder))
        except OutOfBlocksError:
            assert self._may_lack(size), f"{size} blocks were refused though enough were free"
            return
        assert len(block_ids) == size, f"{size} blocks were asked for, {block_ids} were given"
        self._claim(block_ids, [holder] * size)

    @rule(holders=st.lists(_HOLDERS, max_size=4))
    def allocate_each(self, holders: list[str]) -> None:
        """Ask for a block for each of several sequences."""
        try:
            block_ids = self.pool.allocate_each(holders, [0] * len(holders))
        except OutOfBlocksError:
            assert self._may_lack(len(holders)), f"{len(holders)} blocks were refused though enough were free"
            return
        assert len(block_ids) == len(holders), f"a block for each of {holders} was asked for, got {block_ids}"
        self._claim(block_ids, holders)

    @rule(picks=_PICKS)
    def share(self, picks: list[int]) -> None:
        """Add references, sometimes several to one block."""
        block_ids = self._held(picks)
        self.pool.share(block_ids)
        self.refs.update(block_ids)

    @rule(pick=st.integers(0, 15), holder=_HOLDERS)
    def copy_on_write(self, pick: int, holder: str) -> None:
        """Request a writable block in place of a held one."""
        for block_id in self._held([pick]):
            try:
                mine = self.pool.copy_on_write(block_id, SequenceId(holder))
            except OutOfBlocksError:
                assert self.refs[block_id] > 1, "a block of one reference needs no other"
                assert self._may_lack(1), "a block was refused though one was free"
                return
            if self.refs[block_id] == 1:
                assert mine == block_id, f"block {block_id} has one reference, and {mine} was given for it"
            else:
                self._claim([mine], [holder])
                self.refs[block_id] -= 1

    @rule(size=st.integers(0, 4))
    def compact(self, size: int) -> None:
        """Move some blocks as the pool plans, unless others work on it."""
        if self._is_alone:
            moves = self.pool.plan_moves(size)
            assert len(moves) <= size, f"{size} moves were asked for, {moves} are planned"
            self._move(moves)

    @rule(picks=_PICKS, to=st.lists(_IDS, max_size=6))
    def move(self, picks: list[int], to: list[int]) -> None:
        """Move some held blocks to others, which may be held too, or unknown."""
        sources = dict.fromkeys(self._held(picks))
        self._move(list(zip(sources, map(BlockId, to), strict=False)))

    def _move(self, moves: list[tuple[BlockId, BlockId]]) -> None:
        targets = [target for _, target in moves]
        owners = {source: self._owners.pop(source) for source, _ in moves}  # before others can get them
        try:
            self.pool.move(moves)
        except BlockError:
            self._owners.update(owners)
            is_free = self.refs.keys().isdisjoint(targets) and len(set(targets)) == len(targets)
            is_known = all(0 <= target < self.pool.total_blocks for target in targets)
            assert not (self._is_alone and is_free and is_known), "a move to free blocks was refused"
            return
        assert self.refs.keys().isdisjoint(targets), f"the moves {moves} were made; a target is held"
        for source, target in moves:
            num_refs = self.refs.pop(source)
            self._claim([target], [self.holders[source]])
            self.refs[target] = num_refs

    @rule(picks=_PICKS)
    def free(self, picks: list[int]) -> None:
        """Drop references, sometimes more than there are."""
        block_ids = self._held(picks)
        dropped = Counter(block_ids)
        if any(count > self.refs[block_id] for block_id, count in dropped.items()):
            with pytest.raises(BlockError):
                self.pool.free(block_ids)
            return
        gone = [block_id for block_id, count in dropped.items() if count == self.refs[block_id]]
        for block_id in gone:  # before another machine can get it
            del self._owners[block_id]
        self.refs = +(self.refs - dropped)
        came = self.pool.free(block_ids)
        assert came == len(gone), f"free({block_ids}) returned {came}; {len(gone)} blocks became free"

    @rule(picks=_PICKS, wrong=_IDS)
    def name_a_free_block(self, picks: list[int], wrong: int) -> None:
        """Share, free and copy blocks that nobody holds, mixed with held ones."""
        if not self._is_alone:
            wrong = -1  # another machine may hold any other
        if wrong not in self.refs:
            for call in (self.pool.share, self.pool.free):
                with pytest.raises(BlockError):
                    call([*self._held(picks), BlockId(wrong)])
            with pytest.raises(BlockError):
                self.pool.copy_on_write(BlockId(wrong), SequenceId("a"))

    @invariant()
    def the_counts_agree(self) -> None:
        """Every reference is known, the rest is free, and the bookkeeping is consistent."""
        compare(self.pool, [self])
        self.pool.check_integrity()

    def _claim(self, block_ids: Sequence[BlockId], holders: Sequence[str]) -> None:
        """Note who got each block."""
        assert len(set(block_ids)) == len(block_ids), f"one block was handed out twice in {block_ids}"
        again = sorted(self.refs.keys() & set(block_ids))
        assert not again, f"blocks {again} were handed out while they were held"
        for block_id in block_ids:
            assert self._owners.setdefault(block_id, self) is self, "two threads hold one block"
        self.refs.update(block_ids)
        self.holders.update(zip(block_ids, holders, strict=True))

    def _may_lack(self, num_blocks: int) -> bool:
        return not self._is_alone or num_blocks > self.pool.total_blocks - len(self.refs)

    def _held(self, picks: list[int]) -> list[BlockId]:
        held = list(self.refs)
        return [held[pick % len(held)] for pick in picks] if held else []


def compare(pool: KVPoolProtocol, machines: Sequence[KVPoolMachine]) -> None:
    """Compare the whole pool with what all its machines hold together."""
    refs: Counter[BlockId] = Counter()
    holders: dict[BlockId, str] = {}
    for machine in machines:
        assert refs.keys().isdisjoint(machine.refs), "two machines hold one block"
        refs.update(machine.refs)
        holders.update({block_id: machine.holders[block_id] for block_id in machine.refs})
    infos = dict(pool.block_info)
    came = {block_id: info.ref_count for block_id, info in infos.items()}
    assert came == refs, f"references are said to be {came}; they are {dict(refs)}"
    assert {block_id: info.sequence_id for block_id, info in infos.items()} == holders
    assert pool.metrics().num_shared_blocks == sum(count > 1 for count in refs.values())
    num_free, expected = pool.get_free_blocks(), pool.total_blocks - len(refs)
    assert num_free == expected, f"{num_free} blocks are said to be free; {expected} are"
