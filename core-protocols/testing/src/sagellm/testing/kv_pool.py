"""What every KV pool must do. Subclass `KVPoolContract` and override `make`."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

import pytest

from sagellm.core.errors import BlockError, OutOfBlocksError
from sagellm.core.ids import BlockId, SequenceId
from sagellm.core.protocols.kv_pool import KVPoolProtocol
from sagellm.core.runtime import Clock, VirtualClock
from sagellm.testing.cost import least_cpu_ns, slowness
from sagellm.testing.kv_allocator import BAD_IDS, BAD_SIZES, handed_out, need
from sagellm.testing.kv_pool_model import KVPoolMachine, ask, compare
from sagellm.testing.random_operations import run_operations
from sagellm.testing.threads import NUM_THREADS, run_in_threads


class KVPoolContract:
    """The contract of KVPoolProtocol as tests.

    `make` may return a pool with fewer blocks than requested, even none; tests that need more
    are skipped.
    """

    max_growth = 8.0  # of the cost of a call from 2,000 blocks to 64,000; a linear one grows by 32
    budget_us = 200.0  # for allocate, share and free of 32 blocks, best of many

    def make(self, total_blocks: int, block_size: int, clock: Clock) -> KVPoolProtocol:
        """Return a fresh pool."""
        raise NotImplementedError

    def make_with(self, at_least: int, clock: Clock | None = None) -> KVPoolProtocol:
        """Return a fresh pool; skip if it has too few blocks."""
        pool = self.make(max(64, at_least), 16, clock or VirtualClock())
        need(pool.total_blocks, at_least)
        return pool

    def test_everything_is_free_at_first(self) -> None:
        """In a fresh pool all counts but the free blocks are zero."""
        pool = self.make_with(0)
        metrics = pool.metrics()
        assert pool.block_size == 16
        assert pool.get_free_blocks() == metrics.num_free_blocks == metrics.total_blocks == pool.total_blocks
        assert metrics.num_used_blocks == metrics.num_allocations == metrics.num_evicted_blocks == 0
        assert dict(pool.block_info) == {}
        pool.check_integrity()

    def test_allocated_blocks_know_their_holder(self) -> None:
        """Each has one reference, its sequence, its priority and the time on the pool's clock."""
        clock = VirtualClock(start_ns=2_500_000_000)
        pool = self.make_with(3, clock)
        block_ids = pool.allocate(ask(3, "seq", priority=7))
        assert len(set(block_ids)) == 3
        for block_id in block_ids:
            info = pool.block_info[block_id]
            assert (info.block_id, info.sequence_id, info.priority, info.ref_count) == (block_id, "seq", 7, 1)
            assert info.last_access_time == pytest.approx(2.5)

    def test_several_sequences_get_a_block_each(self) -> None:
        """In their order, each with its holder, priority and time, as if each had asked for one."""
        clock = VirtualClock(start_ns=2_500_000_000)
        pool = self.make_with(4, clock)
        block_ids = pool.allocate_each(["a", "b", "a"], [7, -1, 0])
        infos = [pool.block_info[block_id] for block_id in block_ids]
        assert len(set(block_ids)) == 3
        assert [(info.sequence_id, info.priority) for info in infos] == [("a", 7), ("b", -1), ("a", 0)]
        assert {(info.ref_count, info.last_access_time) for info in infos} == {(1, 2.5)}
        assert pool.metrics().num_allocations == 3
        assert pool.allocate_each([], []) == []
        assert pool.free(block_ids) == 3
        pool.check_integrity()

    def test_if_there_is_no_block_for_one_there_is_none_for_any(self) -> None:
        """Nothing was taken, and what is left can still be had."""
        pool = self.make_with(2)
        pool.allocate(ask(pool.total_blocks - 2))
        with pytest.raises(OutOfBlocksError):
            pool.allocate_each(["a", "b", "c"], [0, 0, 0])
        with pytest.raises(ValueError, match=r"zip\(\)"):
            pool.allocate_each(["a", "b"], [0])
        assert pool.get_free_blocks() == 2
        assert len(pool.allocate_each(["a", "b"], [0, 0])) == 2
        pool.check_integrity()

    def test_block_info_is_a_live_view_of_allocated_blocks(self) -> None:
        """A view taken earlier shows later changes, and has no free block."""
        pool = self.make_with(2)
        view = pool.block_info
        assert isinstance(view, Mapping)
        first, second = pool.allocate(ask(2))
        assert set(view) == {first, second}
        pool.free([first])
        assert len(view) == 1
        assert first not in view
        with pytest.raises(KeyError):
            view[first]

    def test_a_shared_block_is_free_after_its_last_reference(self) -> None:
        """Sharing counts up and renews the access time; only the last free gives blocks back."""
        clock = VirtualClock()
        pool = self.make_with(3, clock)
        a, b, c = pool.allocate(ask(3))
        clock.advance_ns(1_000_000_000)
        pool.share([a, b])
        pool.share([a])
        assert [pool.block_info[x].ref_count for x in (a, b, c)] == [3, 2, 1]
        assert [pool.block_info[x].last_access_time for x in (a, c)] == pytest.approx([1, 0])
        assert pool.metrics().num_shared_blocks == 2
        assert pool.free([a, b, c]) == 1
        assert pool.free([a, b]) == 1
        assert pool.free([a]) == 1
        assert pool.get_free_blocks() == pool.total_blocks
        pool.check_integrity()

    def test_an_id_given_twice_counts_twice(self) -> None:
        """For both sharing and freeing, as far as there are references."""
        pool = self.make_with(1)
        (a,) = pool.allocate(ask(1))
        pool.share([a, a])
        with pytest.raises(BlockError):
            pool.free([a, a, a, a])
        assert pool.block_info[a].ref_count == 3
        assert pool.free([a, a, a]) == 1
        pool.check_integrity()

    def test_more_than_is_free_is_refused_with_numbers(self) -> None:
        """The error says who asked for how many and how many are free; nothing was taken."""
        pool = self.make_with(0)
        with pytest.raises(OutOfBlocksError) as caught:
            pool.allocate(ask(pool.total_blocks + 1))
        assert (caught.value.needed, caught.value.available) == (pool.total_blocks + 1, pool.total_blocks)
        assert str(pool.total_blocks + 1) in str(caught.value)
        assert isinstance(caught.value, MemoryError)
        assert pool.get_free_blocks() == pool.total_blocks
        pool.check_integrity()

    def test_metrics_count_what_succeeded_and_what_failed(self) -> None:
        """A refused size is the caller's error, not a failed allocation."""
        pool = self.make_with(2)
        pool.allocate(ask(1))
        with pytest.raises(OutOfBlocksError):
            pool.allocate(ask(pool.total_blocks))
        with pytest.raises(BlockError):
            pool.allocate(ask(0))
        metrics = pool.metrics()
        assert (metrics.num_allocations, metrics.num_failed_allocations) == (1, 1)
        assert metrics.num_used_blocks == 1

    @pytest.mark.parametrize("size", BAD_SIZES, ids=repr)
    def test_a_size_of_zero_or_none_at_all_is_refused(self, size: Any) -> None:
        """So is anything that is not an int."""
        pool = self.make_with(0)
        with pytest.raises(BlockError):
            pool.allocate(ask(size))
        assert pool.get_free_blocks() == pool.total_blocks

    @pytest.mark.parametrize("num_shares", [0, 1])
    @pytest.mark.parametrize("bad", BAD_IDS, ids=repr)
    def test_an_unknown_id_can_be_neither_shared_nor_freed(self, bad: Any, num_shares: int) -> None:
        """One wrong id among right ones refuses them all, in share and in free."""
        pool = self.make_with(0)
        held = pool.allocate(ask(pool.total_blocks)) if pool.total_blocks else []
        pool.share(held * num_shares)
        for call in (pool.share, pool.free):
            for block_ids in ([bad], [*held, bad], [bad, *held]):
                with pytest.raises(BlockError):
                    call(block_ids)
        assert pool.get_free_blocks() == 0
        assert all(info.ref_count == 1 + num_shares for info in pool.block_info.values())
        pool.check_integrity()

    def test_nothing_may_be_shared_and_freed(self) -> None:
        """An empty list is not an error and changes nothing."""
        pool = self.make_with(0)
        pool.share([])
        assert pool.free([]) == 0
        pool.check_integrity()

    def test_no_block_is_freed_twice(self) -> None:
        """A wrong call changes nothing, whichever of its ids is wrong."""
        pool = self.make_with(3)
        a, b, c = pool.allocate(ask(3))
        pool.share([c])
        pool.free([b])
        for block_ids in ([b], [a, b], [a, a], [c, a, b], [c, c, c]):
            with pytest.raises(BlockError):
                pool.free(block_ids)
        with pytest.raises(BlockError):
            pool.share([a, b])
        assert [pool.block_info[x].ref_count for x in (a, c)] == [1, 2]
        pool.check_integrity()

    def test_what_comes_back_is_handed_out_and_what_is_live_is_not(self) -> None:
        """Of 100 and 50 blocks the first are freed; the next 80 include none of the live 50."""
        pool = self.make_with(150)
        first, live = pool.allocate(ask(100, "first")), pool.allocate(ask(50, "live"))
        assert pool.free(first) == 100
        assert set(pool.allocate(ask(80, "next"))).isdisjoint(live)
        assert all(pool.block_info[block_id].sequence_id == "live" for block_id in live)
        assert pool.get_free_blocks() == pool.total_blocks - 130
        pool.check_integrity()

    def test_a_block_of_one_reference_is_written_to_as_it_is(self) -> None:
        """Nothing changes, and it needs no free block."""
        pool = self.make_with(1)
        held = pool.allocate(ask(pool.total_blocks))
        info = pool.block_info[held[0]]
        assert pool.copy_on_write(held[0], SequenceId("b")) == held[0]
        assert pool.block_info[held[0]] == info
        assert pool.metrics().num_allocations == 1

    def test_a_shared_block_is_exchanged_for_a_fresh_one(self) -> None:
        """The writer holds the fresh one as if allocated; the others keep the old one."""
        clock = VirtualClock()
        pool = self.make_with(2, clock)
        (old,) = pool.allocate(ask(1))
        pool.share([old, old])
        clock.advance_ns(1_000_000_000)
        new = pool.copy_on_write(old, SequenceId("b"), 7)
        assert new != old
        assert [pool.block_info[block_id].ref_count for block_id in (old, new)] == [2, 1]
        info = pool.block_info[new]
        assert (info.sequence_id, info.priority) == ("b", 7)
        assert info.last_access_time == pytest.approx(1)
        assert pool.block_info[old].sequence_id == "a"
        assert pool.metrics().num_allocations == 2
        assert pool.free([old, new]) == 1
        assert pool.copy_on_write(old, SequenceId("a")) == old
        pool.check_integrity()

    def test_without_a_free_block_a_shared_one_stays_shared(self) -> None:
        """The error has the numbers and names the writer; every count is unchanged."""
        pool = self.make_with(1)
        held = pool.allocate(ask(pool.total_blocks))
        pool.share(held[:1])
        with pytest.raises(OutOfBlocksError) as caught:
            pool.copy_on_write(held[0], SequenceId("writer"))
        assert (caught.value.needed, caught.value.available) == (1, 0)
        assert "writer" in str(caught.value)
        assert pool.block_info[held[0]].ref_count == 2
        assert pool.metrics().num_failed_allocations == 1
        pool.check_integrity()

    @pytest.mark.parametrize("bad", BAD_IDS, ids=repr)
    def test_what_is_no_block_is_not_copied(self, bad: Any) -> None:
        """Nor is a block that is free; nothing changes."""
        pool = self.make_with(0)
        for block_id in (bad, *range(pool.total_blocks)):
            with pytest.raises(BlockError):
                pool.copy_on_write(block_id, SequenceId("b"))
        assert pool.get_free_blocks() == pool.total_blocks
        pool.check_integrity()

    def test_the_evictor_is_asked_for_what_is_missing(self) -> None:
        """It may call the pool; what it freed is counted."""
        pool = self.make_with(4)
        held = pool.allocate(ask(pool.total_blocks - 1))
        wanted: list[int] = []

        def evict(num_blocks: int) -> int:
            wanted.append(num_blocks)
            return pool.free([held.pop() for _ in range(num_blocks)])

        pool.set_evictor(evict)
        assert pool.evict_if_needed() == 1
        assert wanted == []
        assert pool.evict_if_needed(3) == 3
        assert wanted == [2]
        assert pool.metrics().num_evicted_blocks == 2
        pool.check_integrity()

    def test_an_evictor_that_frees_nothing_is_not_asked_for_ever(self) -> None:
        """Nor is it asked without an evictor, or if the pool is too small for the number."""
        pool = self.make_with(2)
        pool.allocate(ask(pool.total_blocks))
        wanted: list[int] = []

        def evict(num_blocks: int) -> int:
            wanted.append(num_blocks)
            return 0

        pool.set_evictor(evict)
        assert pool.evict_if_needed(pool.total_blocks + 1) == 0
        assert wanted == []
        assert pool.evict_if_needed(2) == 0
        assert wanted == [2]
        pool.set_evictor(None)
        assert pool.evict_if_needed() == 0

    def test_two_pools_share_nothing(self) -> None:
        """What one hands out, the other still has."""
        pool, other = self.make_with(1), self.make_with(1)
        held = pool.allocate(ask(pool.total_blocks))
        assert other.get_free_blocks() == other.total_blocks
        with pytest.raises(BlockError):
            other.free(held)

    def test_it_costs_little(self) -> None:
        """A generous budget, which only another order of growth exceeds."""
        pool = self.make(100_000, 16, VirtualClock())
        need(pool.total_blocks, 100_000)
        pool.share(pool.allocate(ask(50_000)))
        assert least_cpu_ns(lambda: _use(pool), 200) / 1000 < self.budget_us * slowness()

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
        machine, rng = KVPoolMachine(pool), Random(seed)
        for step in range(num_operations):
            machine.step(rng)
            if step % check_every == 0:
                pool.check_integrity()
                compare(pool, [machine])
        compare(pool, [machine])

    def _run_in_eight_threads(self, num_operations: int, *, check_every: int, seed: int = 0) -> None:
        """Divide the operations among threads that know who holds which block."""
        pool = self.make_with(0)
        owners: dict[BlockId, KVPoolMachine] = {}
        machines = [KVPoolMachine(pool, owners) for _ in range(8)]

        def work(thread: int) -> None:
            rng = Random(seed * 8 + thread)
            for step in range(num_operations // 8):
                machines[thread].step(rng)
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

    def test_no_random_sequence_of_calls_disagrees_with_a_model(self) -> None:
        """No reference is lost or invented, and the integrity holds after each step."""
        run_operations(lambda: KVPoolMachine(self.make(16, 16, VirtualClock())))

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
        return least_cpu_ns(lambda: _use(pool), 60)


def _use(pool: KVPoolProtocol) -> None:
    """Hold blocks, share them and give them back."""
    block_ids = pool.allocate(ask(32))
    pool.share(block_ids)
    pool.free(block_ids)
    pool.free(block_ids)


def _handed_out(
    pool: KVPoolProtocol, rng: Random, beside: KVPoolProtocol | None = None
) -> list[list[BlockId]]:
    def elsewhere() -> None:
        if beside is not None and beside.get_free_blocks():
            beside.allocate(ask(1))

    return handed_out(lambda size: pool.allocate(ask(size)), pool.free, pool.get_free_blocks, rng, elsewhere)
