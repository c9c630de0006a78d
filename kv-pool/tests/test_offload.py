"""What is evicted is stored once, and comes back from wherever it is."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sagellm.core import (
    UNNAMED,
    BlockHeader,
    BlockId,
    EvictedBlocks,
    KVMemory,
    KVTierProtocol,
    Namespace,
    Runtime,
    VirtualClock,
    headers_of,
    pack,
)
from sagellm.core.late_kv_tier import LateKVTier
from sagellm.core.protocols.kv_offload import Fetch
from sagellm.core.protocols.kv_tier import NullKVTier
from sagellm.kvmgr.kv_pool import BackendTier, DDRBackend
from sagellm.kvmgr.kv_pool.offload import KVOffload, tiered
from sagellm.kvmgr.kv_pool.tiers.providers import file_tier, host_tier
from sagellm.testing.patience import wait_until

SIZE, BLOCK_BYTES, NUM_BLOCKS = 4, 64, 32
NAMESPACE = Namespace()
TOKENS = pack(range(12 * SIZE))
HEADERS = headers_of(TOKENS, SIZE, NAMESPACE, UNNAMED)


class Blocks:
    """KV memory of 32 blocks; counts the blocks that are read and written."""

    def __init__(self) -> None:
        self.data = [bytearray(BLOCK_BYTES) for _ in range(NUM_BLOCKS)]
        self.num_read = self.num_written = 0

    def copy_blocks(self, pairs: Any) -> None:
        for source, target in pairs:
            self.data[target][:] = self.data[source]

    def read_blocks(self, block_ids: Any, into: Any) -> None:
        self.num_read += len(block_ids)
        for block_id, buffer in zip(block_ids, into, strict=True):
            buffer[:] = self.data[block_id]

    def write_blocks(self, block_ids: Any, data: Any) -> None:
        self.num_written += len(block_ids)
        for block_id, buffer in zip(block_ids, data, strict=True):
            self.data[block_id][:] = buffer


class HeldTier(LateKVTier):
    """Keeps its results until `is_held` is cleared."""

    is_held = True

    def poll(self) -> list[Any]:
        return [] if self.is_held else super().poll()


def kv_of(header: BlockHeader) -> bytes:
    return header.hash * (BLOCK_BYTES // len(header.hash))


def ids(*numbers: int) -> list[BlockId]:
    return [BlockId(number) for number in numbers]


class Bench:
    """An offload over a tier, and the memory beside it."""

    def __init__(self, tier: KVTierProtocol) -> None:
        self.blocks, self.tier = Blocks(), tier
        self.offload = KVOffload(KVMemory(self.blocks, SIZE, BLOCK_BYTES, UNNAMED), tier, rule="always")

    def keep(self, *numbers: int) -> None:
        """Evict these blocks of the prompt, each from the block of its number."""
        for number in numbers:
            self.blocks.data[number][:] = kv_of(HEADERS[number])
        self.offload.keep(EvictedBlocks(ids(*numbers), [HEADERS[number] for number in numbers]))
        for number in numbers:
            self.blocks.data[number][:] = bytes(BLOCK_BYTES)  # somebody else's now

    def fetch(self, *numbers: int) -> Fetch:
        """Fetch these blocks of the prompt to blocks 16 and up."""
        targets = [BlockId(16 + number) for number in numbers]
        return self.offload.begin([HEADERS[number] for number in numbers], targets)

    def poll_until(self, fetch: Fetch) -> None:
        wait_until(lambda: self.offload.poll() or fetch.is_over)  # a file is read on another thread

    def check(self, *numbers: int) -> None:
        """Compare what was fetched."""
        assert [bytes(self.blocks.data[16 + number]) for number in numbers] == [
            kv_of(HEADERS[number]) for number in numbers
        ]
        self.offload.check_integrity()


@pytest.fixture(params=["host", "file"])
def held(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[HeldTier]:
    tier = host_tier(1 << 20) if request.param == "host" else file_tier(1 << 20, folder=str(tmp_path))
    yield HeldTier(tier, random.Random(0))
    tier.close()


def test_what_is_on_its_way_to_a_tier_is_not_written_again(held: HeldTier) -> None:
    bench = Bench(held)
    bench.keep(0, 1, 2)
    bench.keep(0, 1, 2)
    bench.keep(2, 3)
    assert bench.offload.metrics().num_kept_blocks == 4
    assert bench.blocks.num_read == 4
    held.is_held = False
    bench.poll_until(bench.fetch(0, 1, 2, 3))
    bench.check(0, 1, 2, 3)
    while bench.offload._puts:
        bench.offload.poll()
    assert held.metrics().num_puts == 4
    bench.keep(0, 1, 2, 3)
    assert (bench.blocks.num_read, held.metrics().num_puts) == (4, 4)


def test_a_fetch_takes_what_is_on_its_way_to_a_tier_from_the_buffer(held: HeldTier) -> None:
    bench = Bench(held)
    bench.keep(0, 1, 2)
    assert bench.offload.find(TOKENS, NAMESPACE, 0) == HEADERS[:3]
    fetch = bench.fetch(0, 1, 2)
    assert fetch.is_whole
    assert fetch.is_over
    bench.check(0, 1, 2)
    metrics = bench.offload.metrics()
    assert (metrics.num_staged_blocks, metrics.num_fetched_blocks, metrics.num_lost_blocks) == (3, 3, 0)
    assert held.metrics().num_gets == 0


def test_a_prompt_is_found_in_its_own_namespace_whoever_asked_before(held: HeldTier) -> None:
    bench = Bench(held)
    bench.keep(0, 1, 2)
    for other in (Namespace("another"), Namespace(salt="s"), Namespace(adapter="a")):
        assert bench.offload.find(TOKENS, NAMESPACE, 0) == HEADERS[:3]
        assert bench.offload.find(TOKENS, other, 0) == []


def test_a_fetch_goes_on_from_a_tier_to_a_buffer_and_back(held: HeldTier) -> None:
    bench = Bench(held)
    held.is_held = False
    bench.keep(0, 1, 4)
    while bench.offload._puts:
        bench.offload.poll()
    held.is_held = True
    bench.keep(2, 3)
    fetch = bench.fetch(0, 1, 2, 3, 4)
    assert not fetch.is_over
    held.is_held = False
    bench.poll_until(fetch)
    bench.check(0, 1, 2, 3, 4)
    assert bench.offload.metrics().num_fetched_blocks == 5
    assert bench.offload.metrics().num_staged_blocks <= 2


def test_blocks_in_buffers_are_copied_a_chunk_a_step(held: HeldTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sagellm.kvmgr.kv_pool.offload._CHUNK_BYTES", 2 * BLOCK_BYTES)
    bench = Bench(held)
    bench.keep(0, 1, 2, 3, 4, 5, 6)
    fetch = bench.fetch(0, 1, 2, 3, 4, 5, 6)
    steps = [fetch.num_done]
    while not fetch.is_over:
        bench.offload.check_integrity()
        bench.offload.poll()
        steps.append(fetch.num_done)
    assert steps == [4, 6, 7]  # the first poll is a part of `begin`
    bench.check(0, 1, 2, 3, 4, 5, 6)


def test_a_block_that_no_tier_takes_is_fetched_while_its_buffer_is_there() -> None:
    held = HeldTier(NullKVTier(), random.Random(0))
    bench = Bench(held)
    bench.keep(0, 1)
    bench.poll_until(bench.fetch(0, 1))
    bench.check(0, 1)
    held.is_held = False
    while bench.offload._puts:
        bench.offload.poll()
    assert bench.offload.find(TOKENS, NAMESPACE, 0) == []
    fetch = bench.fetch(0, 1)
    bench.poll_until(fetch)
    assert (fetch.num_done, bench.offload.metrics().num_lost_blocks) == (0, 2)


def test_a_fetch_is_known_by_its_blocks_until_it_is_over(held: HeldTier) -> None:
    bench = Bench(held)
    held.is_held = False
    bench.keep(0, 1)
    while bench.offload._puts:
        bench.offload.poll()
    held.is_held = True
    fetch = bench.fetch(0, 1)
    assert [bench.offload.fetch_of(header) for header in HEADERS[:3]] == [fetch, fetch, None]
    held.is_held = False
    bench.poll_until(fetch)
    assert bench.offload.fetch_of(HEADERS[0]) is None


class CheckedTier(LateKVTier):
    """Raises for a put or get of a block that is under way already."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.under_way: dict[Any, set[Any]] = {}

    def submit(self, requests: Any) -> Any:
        names = {(request.action, request.header.key) for request in requests}
        for others in self.under_way.values():
            assert not names & others, "a block is saved or fetched twice at once"
        ticket = super().submit(requests)
        self.under_way[ticket] = names
        return ticket

    def poll(self) -> list[Any]:
        results = super().poll()
        for result in results:
            del self.under_way[result.ticket]
        return results


@pytest.mark.parametrize("seed", range(8))
def test_in_any_order_each_block_is_whole_and_under_way_once(seed: int) -> None:
    chance = random.Random(seed)
    clock = VirtualClock()
    small = {"host": BackendTier(DDRBackend(5 * 512), clock=clock), "below": BackendTier(DDRBackend(9 * 512))}
    joined = tiered(KVMemory(Blocks(), SIZE, BLOCK_BYTES, UNNAMED), tiers=small, clock=clock).tiers
    bench = Bench(CheckedTier(joined, chance, failure_rate=chance.choice((0.0, 0.1))))
    fetches: dict[int, Fetch] = {}  # by the first of their blocks
    num_whole = num_shared = 0
    for _ in range(1_500):
        clock.advance_ns(chance.randrange(10**8))
        start = chance.randrange(12)
        stop = min(12, start + chance.randint(1, 4))
        if chance.random() < 0.3:
            bench.keep(*range(start, stop))
        elif chance.random() < 0.4:
            found = bench.offload.find(TOKENS, NAMESPACE, start * SIZE)[: stop - start]
            if any(bench.offload.fetch_of(header) for header in found):
                num_shared += 1
            elif found:
                fetches[start] = bench.fetch(*range(start, start + len(found)))
        else:
            bench.offload.poll()
        bench.offload.check_integrity()
        for first in [first for first, fetch in fetches.items() if fetch.is_over]:
            fetch = fetches.pop(first)
            bench.check(*range(first, first + fetch.num_done))
            num_whole += fetch.is_whole
    metrics = bench.offload.metrics()
    assert num_whole > 50
    assert num_shared > 10
    assert 0 < metrics.num_staged_blocks < metrics.num_fetched_blocks


def test_tiers_are_joined_with_the_thresholds_of_the_options() -> None:
    memory = KVMemory(Blocks(), SIZE, BLOCK_BYTES, UNNAMED)
    runtime = Runtime.virtual()
    tiers = {"host": host_tier(1 << 20, runtime=runtime)}
    offload = tiered(memory, tiers=tiers, rule="never", clock=runtime.clock, cold_timeout_s=7.0)
    assert offload.tiers.classifier.cold_timeout_s == 7.0
    assert offload.find(TOKENS, NAMESPACE, 0) == []
