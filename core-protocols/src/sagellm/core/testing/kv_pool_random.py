"""Random operations on a KV pool, in one thread and in several."""

from __future__ import annotations

import random

import pytest

from sagellm.core.errors import BlockError
from sagellm.core.ids import BlockId
from sagellm.core.protocols.kv_pool import KVPoolProtocol
from sagellm.core.runtime import Clock, VirtualClock
from sagellm.core.testing.kv_allocator import need
from sagellm.core.testing.kv_pool_model import KVPoolMachine, ask, compare
from sagellm.core.testing.threads import run_in_threads


class KVPoolRandomOperations:
    """The part of `KVPoolContract` that compares a pool with a model."""

    def make(self, total_blocks: int, block_size: int, clock: Clock) -> KVPoolProtocol:
        """Return a fresh pool."""
        raise NotImplementedError

    def make_with(self, at_least: int, clock: Clock | None = None) -> KVPoolProtocol:
        """Return a fresh pool; skip if it has too few blocks."""
        pool = self.make(max(64, at_least), 16, clock or VirtualClock())
        need(pool.total_blocks, at_least)
        return pool

    def test_random_operations_agree_with_a_model(self) -> None:
        """Four thousand of them, with the integrity checked after each."""
        self.run_alone(4_000, check_every=1)

    @pytest.mark.full
    def test_a_million_random_operations_agree_with_a_model(self) -> None:
        """A longer run, with the integrity checked at every hundredth."""
        self.make_with(1)
        self.run_alone(1_000_000, check_every=100, seed=1)

    def test_random_operations_of_eight_threads_agree_with_a_model(self) -> None:
        """No block has two holders, every wrong call is refused, and all counts are exact at the end."""
        self._run_in_eight_threads(8_000, check_every=100)

    @pytest.mark.full
    def test_a_million_random_operations_of_eight_threads_agree_with_a_model(self) -> None:
        """A longer run."""
        self.make_with(1)
        self._run_in_eight_threads(1_000_000, check_every=100, seed=1)

    def test_moves_bring_what_is_free_together(self) -> None:
        """A few at a time, with the integrity checked after each; holders and references move too."""
        pool = self.make_with(8)
        held = sorted(pool.allocate(ask(pool.total_blocks, "seq", priority=3)))
        pool.free(held[::3])
        del held[::3]
        pool.share(held[::2])
        refs = dict(zip(held, ([2, 1] * len(held))[: len(held)], strict=True))
        num_misplaced = pool.metrics().num_misplaced_blocks
        assert num_misplaced > 0
        while moves := pool.plan_moves(3):
            pool.move(moves)
            pool.check_integrity()
            for source, target in moves:
                refs[target] = refs.pop(source)
            infos = pool.block_info
            assert {block_id: info.ref_count for block_id, info in infos.items()} == refs
            assert {(info.sequence_id, info.priority) for info in infos.values()} == {("seq", 3)}
        metrics = pool.metrics()
        assert sorted(refs) == list(range(len(refs)))
        assert metrics.num_moved_blocks == num_misplaced
        assert (metrics.num_misplaced_blocks, metrics.external_fragmentation) == (0, 0)
        assert metrics.largest_free_run == pool.get_free_blocks()

    def test_a_plan_takes_the_highest_to_the_lowest_and_changes_nothing(self) -> None:
        """Neighbours stay in order, and no useless move is planned."""
        pool = self.make_with(8)
        held = sorted(pool.allocate(ask(pool.total_blocks)))
        assert pool.plan_moves(100) == []
        pool.free(held[:4])
        moves = pool.plan_moves(2)
        assert moves == list(zip(held[-2:], held[:2], strict=True))
        assert [target for _, target in pool.plan_moves(100)] == held[:4]
        assert pool.plan_moves(0) == []
        pool.free(held[4:])
        assert pool.plan_moves(100) == []
        assert pool.get_free_blocks() == pool.total_blocks

    def test_a_wrong_move_is_refused_whole(self) -> None:
        """From blocks that are free or repeated, to blocks that are held, repeated or unknown."""
        pool = self.make_with(6)
        a, b, c, d = pool.allocate(ask(4))
        pool.share([a])
        pool.free([c, d])
        wrong = [[(c, d)], [(a, b)], [(a, a)], [(a, c), (a, d)], [(a, c), (b, c)], [(a, BlockId(-1))]]
        for moves in [*wrong, [(a, BlockId(pool.total_blocks))], [(a, c), (BlockId(-1), d)]]:
            with pytest.raises(BlockError):
                pool.move(moves)
            pool.check_integrity()
        pool.move([])
        assert {block_id: info.ref_count for block_id, info in pool.block_info.items()} == {a: 2, b: 1}
        assert pool.metrics().num_moved_blocks == 0

    def run_alone(self, num_operations: int, *, check_every: int, seed: int = 0) -> None:
        """Compare with a reference count per block, mixing in wrong calls."""
        pool = self.make_with(0)
        machine = KVPoolMachine(pool, random.Random(seed))
        for step in range(num_operations):
            machine.step()
            if step % check_every == 0:
                pool.check_integrity()
                compare(pool, [machine])
        compare(pool, [machine])

    def _run_in_eight_threads(self, num_operations: int, *, check_every: int, seed: int = 0) -> None:
        """Divide the operations among threads that know who holds which block."""
        pool = self.make_with(0)
        owners: dict[BlockId, KVPoolMachine] = {}
        machines = [KVPoolMachine(pool, random.Random(seed * 8 + thread), owners) for thread in range(8)]

        def work(thread: int) -> None:
            for step in range(num_operations // 8):
                machines[thread].step()
                if step % check_every == 0:
                    pool.check_integrity()

        run_in_threads(work, num_threads=8)
        pool.check_integrity()
        compare(pool, machines)
        for machine in machines:
            pool.free(list(machine.refs.elements()))
        assert pool.get_free_blocks() == pool.total_blocks
        assert dict(pool.block_info) == {}
        pool.check_integrity()
