"""What every allocator of KV blocks must withstand: any sequence of calls, eight threads, many blocks."""

from __future__ import annotations

import threading
import time
from random import Random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sagellm.core.errors import BlockError, OutOfBlocksError
from sagellm.core.ids import BlockId
from sagellm.core.protocols.kv_allocator import KVAllocatorProtocol
from sagellm.core.testing.random_operations import run_operations
from sagellm.core.testing.threads import NUM_THREADS, run_in_threads

_PICKS = st.lists(st.integers(0, 15), max_size=6)


class KVAllocatorMachine(RuleBasedStateMachine):
    """Makes valid and invalid calls to an allocator, and knows which ids are held."""

    def __init__(self, allocator: KVAllocatorProtocol, total: int) -> None:
        super().__init__()
        self.allocator = allocator
        self.total = total
        self.held: list[BlockId] = []

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


class KVAllocatorLoad:
    """The part of the contract that needs many calls, inherited by `KVAllocatorContract`."""

    max_growth = 8.0  # of the cost of a call from 2,000 blocks to 64,000; a linear one grows by 32

    def make(self, total_blocks: int) -> KVAllocatorProtocol:
        """Return a fresh allocator."""
        raise NotImplementedError

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
        best_ns = 1 << 62
        for _ in range(60):
            begin_ns = time.perf_counter_ns()
            block_ids = allocator.allocate(32)
            allocator.all_allocated(block_ids)
            allocator.free(block_ids)
            best_ns = min(best_ns, time.perf_counter_ns() - begin_ns)
        return best_ns


def _handed_out(
    allocator: KVAllocatorProtocol, rng: Random, beside: KVAllocatorProtocol | None = None
) -> list[list[BlockId]]:
    """Allocate and free at random and return what was handed out; keep another one busy meanwhile."""
    held: list[BlockId] = []
    handed_out = []
    for _ in range(300):
        size = rng.randint(1, 9)
        if size <= allocator.num_free_blocks and rng.random() < 0.6:
            handed_out.append(list(allocator.allocate(size)))
            held += handed_out[-1]
        else:
            rng.shuffle(held)
            allocator.free(held[:size])
            del held[:size]
        if beside is not None and beside.num_free_blocks:
            beside.allocate(1)
    return handed_out
