"""What every KV pool must withstand: any sequence of calls, eight threads, many blocks."""

from __future__ import annotations

import time
from collections import Counter
from random import Random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sagellm.core.errors import BlockError, OutOfBlocksError
from sagellm.core.ids import BlockId
from sagellm.core.protocols.kv_pool import KVPoolProtocol
from sagellm.core.runtime import Clock, VirtualClock
from sagellm.core.testing.kv_pool_model import ask
from sagellm.core.testing.random_operations import run_operations
from sagellm.core.testing.threads import NUM_THREADS, run_in_threads

_PICKS = st.lists(st.integers(0, 15), max_size=6)


class KVPoolOperations(RuleBasedStateMachine):
    """Makes valid and invalid calls to a pool, and counts the references of each block."""

    def __init__(self, pool: KVPoolProtocol) -> None:
        super().__init__()
        self.pool = pool
        self.refs: Counter[BlockId] = Counter()

    @rule(size=st.integers(0, 6), holder=st.sampled_from("ab"))
    def allocate(self, size: int, holder: str) -> None:
        """Request some blocks, sometimes none or more than are free."""
        if not 1 <= size <= self.pool.total_blocks - len(self.refs):
            with pytest.raises(OutOfBlocksError if size else BlockError):
                self.pool.allocate(ask(size, holder))
            return
        block_ids = self.pool.allocate(ask(size, holder))
        assert len(set(block_ids)) == size, f"{size} blocks were asked for, {block_ids} were given"
        again = sorted(self.refs.keys() & set(block_ids))
        assert not again, f"blocks {again} were handed out while they were held"
        self.refs.update(block_ids)

    @rule(picks=_PICKS)
    def share(self, picks: list[int]) -> None:
        """Add references, sometimes several to one block."""
        block_ids = self._held(picks)
        self.pool.share(block_ids)
        self.refs.update(block_ids)

    @rule(picks=_PICKS)
    def free(self, picks: list[int]) -> None:
        """Drop references, sometimes more than there are."""
        block_ids = self._held(picks)
        dropped = Counter(block_ids)
        if any(count > self.refs[block_id] for block_id, count in dropped.items()):
            with pytest.raises(BlockError):
                self.pool.free(block_ids)
            return
        left = +(self.refs - dropped)
        expected = len(self.refs) - len(left)
        came = self.pool.free(block_ids)
        assert came == expected, f"free({block_ids}) returned {came}; {expected} blocks became free"
        self.refs = left

    @rule(size=st.integers(0, 4))
    def compact(self, size: int) -> None:
        """Move some blocks as the pool plans."""
        moves = self.pool.plan_moves(size)
        assert len(moves) <= size, f"{size} moves were asked for, {moves} are planned"
        self.pool.move(moves)
        for source, target in moves:
            assert target not in self.refs, f"block {target} is held, and {source} was to be moved there"
            self.refs[target] = self.refs.pop(source)

    @rule(picks=_PICKS, wrong=st.integers(-1, 16))
    def name_a_free_block(self, picks: list[int], wrong: int) -> None:
        """Share and free blocks that nobody holds, mixed with held ones."""
        if wrong not in self.refs:
            for call in (self.pool.share, self.pool.free):
                with pytest.raises(BlockError):
                    call([*self._held(picks), BlockId(wrong)])

    def _held(self, picks: list[int]) -> list[BlockId]:
        held = list(self.refs)
        return [held[pick % len(held)] for pick in picks] if held else []

    @invariant()
    def the_counts_agree(self) -> None:
        """Every reference is known, the rest is free, and the bookkeeping is consistent."""
        came = {block_id: info.ref_count for block_id, info in self.pool.block_info.items()}
        assert came == self.refs, f"references are said to be {came}; they are {dict(self.refs)}"
        num_free = self.pool.total_blocks - len(self.refs)
        assert self.pool.get_free_blocks() == num_free, (
            f"{self.pool.get_free_blocks()} blocks are said to be free; {num_free} are"
        )
        self.pool.check_integrity()


class KVPoolLoad:
    """The part of the contract that needs many calls, inherited by `KVPoolContract`."""

    max_growth = 8.0  # of the cost of a call from 2,000 blocks to 64,000; a linear one grows by 32

    def make(self, total_blocks: int, block_size: int, clock: Clock) -> KVPoolProtocol:
        """Return a fresh pool."""
        raise NotImplementedError

    def test_no_random_sequence_of_calls_disagrees_with_a_model(self) -> None:
        """No reference is lost or invented, and the integrity holds after each step."""
        run_operations(lambda: KVPoolOperations(self.make(16, 16, VirtualClock())))

    def test_the_integrity_holds_while_all_blocks_come_and_go(self) -> None:
        """One by one, in the order of allocation and in reverse, held once and twice."""
        pool = self.make(24, 16, VirtualClock())
        for step in (1, -1):
            held = []
            for _ in range(pool.total_blocks):
                held += pool.allocate(ask(1))
                pool.share(held[-1:] * (len(held) % 2))
                pool.check_integrity()
            for block_id in held[::step] + held[::2]:
                pool.free([block_id])
                pool.check_integrity()
            assert pool.get_free_blocks() == pool.total_blocks

    def test_two_pools_decide_without_each_other(self) -> None:
        """Equal calls give equal ids, whatever calls another pool gets in between."""
        alone = _handed_out(self.make(64, 16, VirtualClock()), Random(1))
        other = self.make(64, 16, VirtualClock())
        assert _handed_out(self.make(64, 16, VirtualClock()), Random(1), beside=other) == alone, (
            "other blocks came"
        )

    def test_eight_threads_may_have_a_pool_each(self) -> None:
        """Nothing that two of them share is changed without a lock."""
        alone = _handed_out(self.make(64, 16, VirtualClock()), Random(2))

        def work(_thread: int) -> None:
            came = _handed_out(self.make(64, 16, VirtualClock()), Random(2))
            assert came == alone, "another thread changed what came"

        run_in_threads(work, num_threads=NUM_THREADS)

    def test_the_cost_of_a_call_does_not_grow_with_the_number_of_blocks(self) -> None:
        """`allocate`, `share` and `free` look only at the blocks of the call."""
        few_ns, many_ns = (self._cost_ns(num_blocks) for num_blocks in (2_000, 64_000))
        assert many_ns / few_ns < self.max_growth, (
            f"32 blocks take {few_ns / 1000:.1f} µs among 2,000 and {many_ns / 1000:.1f} µs among 64,000"
        )

    def _cost_ns(self, num_blocks: int) -> int:
        pool = self.make(num_blocks, 16, VirtualClock())
        if pool.total_blocks < num_blocks:
            pytest.skip(f"needs {num_blocks} blocks, this one has {pool.total_blocks}")
        pool.free(pool.allocate(ask(num_blocks // 2))[::2])
        best_ns = 1 << 62
        for _ in range(60):
            begin_ns = time.perf_counter_ns()
            block_ids = pool.allocate(ask(32))
            pool.share(block_ids)
            pool.free(block_ids)
            pool.free(block_ids)
            best_ns = min(best_ns, time.perf_counter_ns() - begin_ns)
        return best_ns


def _handed_out(
    pool: KVPoolProtocol, rng: Random, beside: KVPoolProtocol | None = None
) -> list[list[BlockId]]:
    """Allocate and free at random and return what was handed out; keep another one busy meanwhile."""
    held: list[BlockId] = []
    handed_out = []
    for _ in range(300):
        size = rng.randint(1, 9)
        if size <= pool.get_free_blocks() and rng.random() < 0.6:
            handed_out.append(pool.allocate(ask(size)))
            held += handed_out[-1]
        else:
            rng.shuffle(held)
            pool.free(held[:size])
            del held[:size]
        if beside is not None and beside.get_free_blocks():
            beside.allocate(ask(1))
    return handed_out
