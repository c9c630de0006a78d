"""What every allocator of KV blocks must do. Subclass `KVAllocatorContract` and override `make`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sagellm.core.errors import BlockError, OutOfBlocksError
from sagellm.core.ids import BlockId
from sagellm.core.protocols.kv_allocator import KVAllocatorProtocol
from sagellm.testing.cost import least_cpu_ns, slowness
from sagellm.testing.random_operations import run_operations
from sagellm.testing.threads import NUM_THREADS, run_in_threads

BAD_SIZES: list[Any] = [0, -1, True, 1.0, "1", None]
BAD_IDS: list[Any] = [-1, 1 << 40, True, False, 0.0, 1.5, "0", None, [0]]
_PICKS = st.lists(st.integers(0, 15), max_size=6)


def need(num_blocks: int, at_least: int) -> None:
    """Skip a test that needs more blocks than an implementation has."""
    if num_blocks < at_least:
        pytest.skip(f"needs {at_least} blocks, this one has {num_blocks}")


class KVAllocatorContract:
    """The contract of KVAllocatorProtocol as tests.

    `make` may return an allocator with fewer blocks than requested, even none; tests that need more
    are skipped.
    """

    max_growth = 8.0  # of the cost of a call from 2,000 blocks to 64,000; a linear one grows by 32
    budget_us = 100.0  # for allocate and free of 32 blocks, best of many; twenty times the allowed cost

    def make(self, total_blocks: int) -> KVAllocatorProtocol:
        """Return a fresh allocator."""
        raise NotImplementedError

    def make_with(self, at_least: int) -> tuple[KVAllocatorProtocol, int]:
        """Return a fresh allocator and its number of blocks; skip if there are too few."""
        allocator = self.make(max(64, at_least))
        total = allocator.metrics().total_blocks
        need(total, at_least)
        return allocator, total

    def test_everything_is_free_at_first(self) -> None:
        """A fresh allocator has one free run of all its blocks."""
        allocator, total = self.make_with(0)
        metrics = allocator.metrics()
        assert allocator.num_free_blocks == metrics.num_free_blocks == total
        assert metrics.largest_free_run == total
        assert metrics.external_fragmentation == 0
        allocator.check_integrity()

    def test_all_blocks_can_be_had_at_once(self) -> None:
        """The ids are 0 … total_blocks - 1, each once, plain ints."""
        allocator, total = self.make_with(1)
        block_ids = allocator.allocate(total)
        assert sorted(block_ids) == list(range(total))
        assert set(map(type, block_ids)) == {int}
        assert allocator.num_free_blocks == 0
        assert allocator.metrics().external_fragmentation == 0
        allocator.free(block_ids)
        assert allocator.num_free_blocks == total

    def test_one_block_more_than_there_are_is_refused(self) -> None:
        """The error carries both numbers, and nothing was taken."""
        allocator, total = self.make_with(0)
        with pytest.raises(OutOfBlocksError) as caught:
            allocator.allocate(total + 1)
        assert (caught.value.needed, caught.value.available) == (total + 1, total)
        assert isinstance(caught.value, MemoryError)
        assert allocator.num_free_blocks == total
        allocator.check_integrity()

    @pytest.mark.parametrize("size", BAD_SIZES, ids=repr)
    def test_a_size_of_zero_or_none_at_all_is_refused(self, size: Any) -> None:
        """So is anything that is not an int."""
        allocator, total = self.make_with(0)
        with pytest.raises(BlockError):
            allocator.allocate(size)
        assert allocator.num_free_blocks == total

    @pytest.mark.parametrize("bad", BAD_IDS, ids=repr)
    def test_an_unknown_id_cannot_be_freed(self, bad: Any) -> None:
        """One wrong id among right ones refuses them all."""
        allocator, total = self.make_with(0)
        held = allocator.allocate(total) if total else []
        for block_ids in ([bad], [*held, bad], [bad, *held]):
            with pytest.raises(BlockError):
                allocator.free(block_ids)
        assert allocator.num_free_blocks == 0
        assert not allocator.all_allocated([bad])
        assert allocator.all_allocated(held)
        allocator.check_integrity()

    def test_nothing_may_be_freed(self) -> None:
        """An empty list is accepted and changes nothing."""
        allocator, total = self.make_with(0)
        allocator.free([])
        assert allocator.all_allocated([])
        assert allocator.num_free_blocks == total

    def test_no_block_is_freed_twice(self) -> None:
        """Neither two calls nor one call can free a block twice."""
        allocator, total = self.make_with(3)
        a, b, c = allocator.allocate(3)
        allocator.free([b])
        for block_ids in ([b], [a, b], [a, a], [a, c, a]):
            with pytest.raises(BlockError):
                allocator.free(block_ids)
        assert allocator.all_allocated([a, c])
        assert not allocator.all_allocated([a, b])
        assert allocator.num_free_blocks == total - 2
        allocator.check_integrity()
        allocator.free([c, a])
        allocator.check_integrity()

    def test_what_comes_back_is_handed_out_and_what_is_live_is_not(self) -> None:
        """Of 100 and 50 blocks the first are freed; the next 80 include none of the live 50."""
        allocator, total = self.make_with(150)
        first, live = allocator.allocate(100), allocator.allocate(50)
        allocator.free(first)
        assert set(allocator.allocate(80)).isdisjoint(live)
        assert allocator.all_allocated(live)
        assert allocator.num_free_blocks == total - 130
        allocator.check_integrity()

    def test_the_order_of_freeing_does_not_matter(self) -> None:
        """Whatever the order in which single blocks are freed, all are one free run in the end."""
        for seed in range(5):
            allocator, total = self.make_with(0)
            held = allocator.allocate(total) if total else []
            Random(seed).shuffle(held)
            for block_id in held:
                allocator.free([block_id])
            assert allocator.metrics().largest_free_run == total
            allocator.check_integrity()
            assert not total or sorted(allocator.allocate(total)) == list(range(total))

    def test_fragmentation_follows_its_formula(self) -> None:
        """With every other block held, the largest run is one."""
        allocator, total = self.make_with(4)
        block_ids = sorted(allocator.allocate(total))
        allocator.free(block_ids[::2])
        metrics = allocator.metrics()
        assert metrics.largest_free_run == 1
        assert metrics.external_fragmentation == pytest.approx(1 - 1 / len(block_ids[::2]))

    def test_the_very_blocks_that_are_asked_for_can_be_claimed(self) -> None:
        """They are held like allocated ones, and only they are marked in the occupancy."""
        allocator, total = self.make_with(4)
        (held,) = allocator.allocate(1)
        wanted = [BlockId(block_id) for block_id in range(total - 1, -1, -1) if block_id != held][::2]
        allocator.claim(wanted)
        assert allocator.all_allocated([*wanted, held])
        assert allocator.num_free_blocks == total - len(wanted) - 1
        assert [block_id for block_id, mark in enumerate(allocator.occupancy()) if mark] == sorted(
            [*wanted, held]
        )
        allocator.check_integrity()
        rest = allocator.allocate(allocator.num_free_blocks)
        assert set(rest).isdisjoint([*wanted, held])
        allocator.free([*wanted, *rest, held])
        allocator.check_integrity()

    @pytest.mark.parametrize("bad", BAD_IDS, ids=repr)
    def test_what_is_no_free_block_cannot_be_claimed(self, bad: Any) -> None:
        """An invalid id, one that is held, or one given twice is refused, and nothing changes."""
        allocator, total = self.make_with(3)
        a, b = allocator.allocate(2)
        allocator.free([b])
        for block_ids in ([bad], [b, bad], [bad, b], [a], [b, a], [b, b]):
            with pytest.raises(BlockError):
                allocator.claim(block_ids)
        allocator.claim([])
        assert allocator.num_free_blocks == total - 1
        assert sum(allocator.occupancy()) == 1
        allocator.check_integrity()

    def test_what_is_free_can_be_brought_together(self) -> None:
        """The highest blocks move to the lowest gaps, one by one, until there is one free run."""
        allocator, total = self.make_with(4)
        allocator.free(sorted(allocator.allocate(total))[::2])
        num_held = total - allocator.num_free_blocks
        while (occupancy := allocator.occupancy()).rfind(1) >= num_held:
            allocator.claim([BlockId(occupancy.find(0))])
            allocator.free([BlockId(occupancy.rfind(1))])
            allocator.check_integrity()
        metrics = allocator.metrics()
        assert metrics.largest_free_run == metrics.num_free_blocks == total - num_held
        assert metrics.external_fragmentation == 0

    def test_two_allocators_share_nothing(self) -> None:
        """What one hands out, the other still has."""
        allocator, total = self.make_with(1)
        other = self.make(64)
        held = allocator.allocate(total)
        assert other.num_free_blocks == total
        assert not other.all_allocated(held)
        with pytest.raises(BlockError):
            other.free(held)

    def test_random_operations_agree_with_a_model(self) -> None:
        """Ten thousand of them, with the integrity checked after each."""
        self.run_random_operations(10_000, check_every=1)

    @pytest.mark.full
    def test_a_million_random_operations_agree_with_a_model(self) -> None:
        """A longer run, with the integrity checked at every hundredth."""
        self.make_with(1)
        self.run_random_operations(1_000_000, check_every=100, seed=1)

    def run_random_operations(self, num_operations: int, *, check_every: int, seed: int = 0) -> None:
        """Compare with a set of held ids, mixing in wrong calls."""
        machine, rng = KVAllocatorMachine(*self.make_with(0)), Random(seed)
        for step in range(num_operations):
            machine.step(rng)
            if step % check_every == 0:
                machine.the_counts_agree()

    def test_it_costs_little(self) -> None:
        """A generous budget, which only another order of growth exceeds."""
        allocator = self.make(100_000)
        need(allocator.num_free_blocks, 100_000)
        allocator.allocate(50_000)
        best_ns = least_cpu_ns(lambda: allocator.free(allocator.allocate(32)), 200)
        assert best_ns / 1000 < self.budget_us * slowness()

    def test_no_random_sequence_of_calls_disagrees_with_a_model(self) -> None:
        """No block is held twice, lost or invented, and the integrity holds after each step."""
        run_operations(lambda: KVAllocatorMachine(*self._sized(16)))

    def test_the_integrity_holds_while_all_blocks_come_and_go(self) -> None:
        """One by one, in the order of allocation, in reverse, and with gaps."""
        allocator, total = self._sized(24)
        for order in (slice(None), slice(None, None, -1), slice(None, None, 2)):
            held = []
            for _ in range(total):
                held += allocator.allocate(1)
                allocator.check_integrity()
            for block_id in held[order] + ([] if order.step != 2 else held[1::2]):
                allocator.free([block_id])
                allocator.check_integrity()
            assert allocator.num_free_blocks == total

    def test_two_allocators_decide_without_each_other(self) -> None:
        """Equal calls give equal ids, whatever calls another allocator gets in between."""
        alone = _handed_out(self.make(64), Random(1))
        other = self.make(64)
        assert _handed_out(self.make(64), Random(1), beside=other) == alone, "other blocks came"

    def test_eight_threads_may_take_turns(self) -> None:
        """The pool calls from any thread under its own lock."""
        allocator, total = self._sized(64)
        lock, holders = threading.Lock(), dict[BlockId, int]()

        def work(thread: int) -> None:
            rng = Random(thread)
            for _ in range(200):
                with lock:
                    size = min(rng.randint(0, 7), allocator.num_free_blocks)
                    block_ids = allocator.allocate(size) if size else []
                    for block_id in block_ids:
                        assert holders.setdefault(block_id, thread) == thread, "two threads hold one block"
                with lock:
                    allocator.free(block_ids)
                    for block_id in block_ids:
                        del holders[block_id]

        run_in_threads(work, num_threads=NUM_THREADS)
        assert allocator.num_free_blocks == total
        allocator.check_integrity()

    def test_eight_threads_may_have_an_allocator_each(self) -> None:
        """Nothing that two of them share is changed without a lock."""
        alone = _handed_out(self.make(64), Random(2))

        def work(_thread: int) -> None:
            assert _handed_out(self.make(64), Random(2)) == alone, "another thread changed what came"

        run_in_threads(work, num_threads=NUM_THREADS)

    def test_the_cost_of_a_call_does_not_grow_with_the_number_of_blocks(self) -> None:
        """`allocate`, `free` and `all_allocated` cost O(1) per block."""
        few_ns, many_ns = (self._cost_ns(num_blocks) for num_blocks in (2_000, 64_000))
        grown = many_ns / few_ns
        assert grown < self.max_growth, (
            f"32 blocks take {few_ns / 1000:.1f} µs among 2,000 and {many_ns / 1000:.1f} µs among 64,000"
        )

    def _sized(self, num_blocks: int) -> tuple[KVAllocatorProtocol, int]:
        allocator = self.make(num_blocks)
        return allocator, allocator.metrics().total_blocks

    def _cost_ns(self, num_blocks: int) -> int:
        allocator = self.make(num_blocks)
        if allocator.num_free_blocks < num_blocks:
            pytest.skip(f"needs {num_blocks} blocks, this one has {allocator.num_free_blocks}")
        held = allocator.allocate(num_blocks // 2)
        allocator.free(held[::2])

        def call() -> None:
            block_ids = allocator.allocate(32)
            allocator.all_allocated(block_ids)
            allocator.free(block_ids)

        return least_cpu_ns(call, 60)


class KVAllocatorMachine(RuleBasedStateMachine):
    """Makes valid and invalid calls to an allocator, and knows which ids are held."""

    def __init__(self, allocator: KVAllocatorProtocol, total: int) -> None:
        super().__init__()
        self.allocator = allocator
        self.total = total
        self.held: list[BlockId] = []

    def step(self, rng: Random) -> None:
        """Make one call, right or wrong, with random arguments."""
        draw, picks = rng.random(), [rng.randrange(1 << 16) for _ in range(rng.randint(0, 12))]
        if draw < 0.45:
            self.allocate(size=rng.randint(0, 12))
        elif draw < 0.55:
            self.claim(wanted=[rng.randrange(-1, self.total + 1) for _ in range(rng.randint(0, 3))])
        elif draw < 0.9:
            self.free(picks=picks)
        else:
            self.free_with_a_wrong_id(picks=picks, wrong=rng.randrange(-1, self.total + 1))
        assert self.allocator.num_free_blocks == self.total - len(self.held)

    @rule(size=st.integers(0, 6))
    def allocate(self, size: int) -> None:
        """Request some blocks, sometimes none or more than are free."""
        num_free = self.total - len(self.held)
        if not 1 <= size <= num_free:
            with pytest.raises(OutOfBlocksError if size else BlockError):
                self.allocator.allocate(size)
            return
        block_ids = self.allocator.allocate(size)
        assert len(block_ids) == size, f"{size} blocks were asked for, {len(block_ids)} were given"
        again = sorted(set(block_ids) & set(self.held))
        assert not again, f"blocks {again} were handed out while they were held"
        assert len(set(block_ids)) == size, f"one block was handed out twice in {block_ids}"
        unknown = [block_id for block_id in block_ids if not 0 <= block_id < self.total]
        assert not unknown, f"blocks {unknown} do not exist; there are {self.total}"
        self.held += block_ids

    @rule(picks=_PICKS)
    def free(self, picks: list[int]) -> None:
        """Free some of the held blocks, in any order."""
        chosen = self._chosen(picks)
        self.allocator.free(chosen)
        self.held = [block_id for block_id in self.held if block_id not in chosen]

    @rule(wanted=st.lists(st.integers(-1, 16), max_size=3))
    def claim(self, wanted: list[int]) -> None:
        """Claim certain blocks, sometimes held, unknown or repeated ones."""
        block_ids = [BlockId(block_id) for block_id in wanted]
        is_known = all(0 <= block_id < self.total for block_id in wanted)
        if not is_known or len(set(wanted)) < len(wanted) or not set(wanted).isdisjoint(self.held):
            with pytest.raises(BlockError):
                self.allocator.claim(block_ids)
            return
        self.allocator.claim(block_ids)
        self.held += block_ids

    @rule(picks=_PICKS, wrong=st.integers(-1, 16))
    def free_with_a_wrong_id(self, picks: list[int], wrong: int) -> None:
        """Free an id that is free, unknown, or repeated."""
        chosen = self._chosen(picks)
        if wrong in self.held and wrong not in chosen:
            chosen.append(BlockId(wrong))
        with pytest.raises(BlockError):
            self.allocator.free([*chosen, BlockId(wrong)])

    def _chosen(self, picks: list[int]) -> list[BlockId]:
        return list(dict.fromkeys(self.held[pick % len(self.held)] for pick in picks)) if self.held else []

    @invariant()
    def the_counts_agree(self) -> None:
        """Held blocks are allocated, the rest is free, and the bookkeeping is consistent."""
        num_free = self.total - len(self.held)
        came = self.allocator.num_free_blocks
        assert came == num_free, f"{came} blocks are said to be free; {num_free} of {self.total} are"
        assert self.allocator.all_allocated(self.held), f"all_allocated({self.held}) is false; they are held"
        marked = [block_id for block_id, mark in enumerate(self.allocator.occupancy()) if mark]
        assert marked == sorted(self.held), f"occupancy marks {marked}; {sorted(self.held)} are held"
        self.allocator.check_integrity()


def handed_out(
    allocate: Callable[[int], Sequence[BlockId]],
    free: Callable[[list[BlockId]], object],
    num_free: Callable[[], int],
    rng: Random,
    elsewhere: Callable[[], None],
) -> list[list[BlockId]]:
    """Allocate and free at random and return what was handed out; call `elsewhere` in between."""
    held: list[BlockId] = []
    handed_out = []
    for _ in range(300):
        size = rng.randint(1, 9)
        if size <= num_free() and rng.random() < 0.6:
            handed_out.append(list(allocate(size)))
            held += handed_out[-1]
        else:
            rng.shuffle(held)
            free(held[:size])
            del held[:size]
        elsewhere()
    return handed_out


def _handed_out(
    allocator: KVAllocatorProtocol, rng: Random, beside: KVAllocatorProtocol | None = None
) -> list[list[BlockId]]:
    def elsewhere() -> None:
        if beside is not None and beside.num_free_blocks:
            beside.allocate(1)

    return handed_out(allocator.allocate, allocator.free, lambda: allocator.num_free_blocks, rng, elsewhere)
