"""Random operations on a KV pool, in one thread and in many."""

from __future__ import annotations

import random

import pytest

from sagellm.core.ids import BlockId
from sagellm.core.protocols.kv_pool import KVPoolProtocol
from sagellm.core.runtime import Clock, VirtualClock
from sagellm.core.testing.kv_allocator import need
from sagellm.core.testing.kv_pool_model import KVPoolMachine, compare
from sagellm.core.testing.threads import run_in_threads


class KVPoolRandomOperations:
    """The part of `KVPoolContract` that compares a pool with a model."""

    def make(self, total_blocks: int, block_size: int, clock: Clock) -> KVPoolProtocol:
        """Return a fresh pool."""
        raise NotImplementedError

    def make_with(self, at_least: int, clock: Clock | None = None) -> KVPoolProtocol:
        """Return a fresh pool; skip where its blocks are too few."""
        pool = self.make(max(64, at_least), 16, clock or VirtualClock())
        need(pool.total_blocks, at_least)
        return pool

    def test_random_operations_agree_with_a_model(self) -> None:
        """Ten thousand of them, with the integrity checked after each."""
        self._run_alone(10_000, check_every=1)

    @pytest.mark.full
    def test_a_million_random_operations_agree_with_a_model(self) -> None:
        """The same for long, with the integrity checked at every hundredth."""
        self.make_with(1)
        self._run_alone(1_000_000, check_every=100, seed=1)

    def test_random_operations_of_eight_threads_agree_with_a_model(self) -> None:
        """No block has two holders, every wrong call is refused, and all counts are exact at the end."""
        self._run_in_eight_threads(8_000, check_every=100)

    @pytest.mark.full
    def test_a_million_random_operations_of_eight_threads_agree_with_a_model(self) -> None:
        """The same for long."""
        self.make_with(1)
        self._run_in_eight_threads(1_000_000, check_every=100, seed=1)

    def _run_alone(self, num_operations: int, *, check_every: int, seed: int = 0) -> None:
        """Compare with a count of references by block, wrong calls among the right ones."""
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
