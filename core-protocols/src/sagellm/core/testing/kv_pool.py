"""What every KV pool must do. Subclass `KVPoolContract` and override `make`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pytest

from sagellm.core.errors import BlockError, OutOfBlocksError
from sagellm.core.ids import SequenceId
from sagellm.core.runtime import VirtualClock
from sagellm.core.testing.kv_allocator import BAD_IDS, BAD_SIZES, need
from sagellm.core.testing.kv_pool_load import KVPoolLoad
from sagellm.core.testing.kv_pool_model import ask
from sagellm.core.testing.kv_pool_random import KVPoolRandomOperations


class KVPoolContract(KVPoolLoad, KVPoolRandomOperations):
    """The contract of KVPoolProtocol as tests.

    `make` may return a pool with fewer blocks than requested, even none; tests that need more
    are skipped.
    """

    budget_us = 200.0  # for allocate, share and free of 32 blocks, best of many

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
        best_ns = 1 << 62
        for _ in range(200):
            begin_ns = time.perf_counter_ns()
            block_ids = pool.allocate(ask(32))
            pool.share(block_ids)
            pool.free(block_ids)
            pool.free(block_ids)
            best_ns = min(best_ns, time.perf_counter_ns() - begin_ns)
        assert best_ns / 1000 < self.budget_us
