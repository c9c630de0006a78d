from __future__ import annotations

import sys
from itertools import count
from random import Random

import pytest

from sagellm.core import BlockError, ConfigError, OutOfMemoryError, Randomness, VirtualClock
from sagellm.core.late_kv_tier import LateKVTier
from sagellm.core.protocols.kv_tier import (
    KVTierProtocol,
    NullKVTier,
    Ticket,
    TierRequest,
    TierResult,
    run_to_end,
)
from sagellm.core.runtime import MemoryFiles
from sagellm.kvmgr.kv_pool.tiers.backend_tier import BackendTier
from sagellm.kvmgr.kv_pool.tiers.backends import DDRBackend, HBMBackend, NVMeBackend
from sagellm.kvmgr.kv_pool.tiers.classifier import HotColdClassifier
from sagellm.kvmgr.kv_pool.tiers.offsets import OffsetAllocator
from sagellm.kvmgr.kv_pool.tiers.storage import TieredKVStorage
from sagellm.testing.kv_tier import BLOCK_BYTES, KVTierContract, get, make_data, make_header, put
from sagellm.testing.kv_tier_model import KVTierMachine

_names = count()


def file_tier(max_bytes: int) -> BackendTier:
    return BackendTier(NVMeBackend(f"/tier{next(_names)}", max_bytes, files=MemoryFiles()))


def late(tier: KVTierProtocol, seed: int, failure_rate: float = 0.0) -> LateKVTier:
    return LateKVTier(tier, Randomness(seed).stream("late"), failure_rate=failure_rate)


class TestHostTier(KVTierContract):
    def make(self, max_bytes: int) -> KVTierProtocol:
        return BackendTier(DDRBackend(max_bytes))


def device(max_bytes: int) -> HBMBackend:
    pytest.importorskip("torch")
    return HBMBackend(max_bytes)


def test_memory_of_a_device_says_that_it_needs_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match=r"HBMBackend needs torch: pip install 'sagellm-kv-pool\[torch\]'"):
        HBMBackend(1 << 20)


class TestDeviceTier(KVTierContract):
    def make(self, max_bytes: int) -> KVTierProtocol:
        return BackendTier(device(max_bytes))


class TestFileTier(KVTierContract):
    def make(self, max_bytes: int) -> KVTierProtocol:
        return file_tier(max_bytes)


class TestNullTier(KVTierContract):
    def make(self, max_bytes: int) -> KVTierProtocol:
        return NullKVTier(max_bytes)


class TestTieredStorage(KVTierContract):
    num_long_operations = 200_000

    def make(self, max_bytes: int) -> KVTierProtocol:
        host, file = BackendTier(DDRBackend(max_bytes // 4)), file_tier(max_bytes // 2)
        return TieredKVStorage({"host": host, "file": file}, clock=VirtualClock())


class TestTieredStorageOverLateTiers(KVTierContract):
    def make(self, max_bytes: int) -> KVTierProtocol:
        tiers = {
            "host": late(BackendTier(DDRBackend(max_bytes // 4)), 1),
            "file": late(file_tier(max_bytes // 4), 2),
            "last": late(file_tier(max_bytes // 2), 3),
        }
        return TieredKVStorage(tiers, clock=VirtualClock())


@pytest.mark.parametrize("make", [DDRBackend, device, lambda n: NVMeBackend("/x", n, files=MemoryFiles())])
def test_allocate_100_and_50_free_the_first_allocate_80_overlaps_nothing(make):
    backend = make(4 * 4096 * 100)
    unit = backend.ranges.alignment
    first, second = backend.allocate(100 * unit), backend.allocate(50 * unit)
    backend.write(second, [b"s" * 50 * unit])
    backend.deallocate(first)
    third = backend.allocate(80 * unit)
    backend.write(third, [b"t" * 80 * unit])
    assert third + 80 * unit <= second or second + 50 * unit <= third
    found = bytearray(50 * unit)
    assert backend.read(second, [memoryview(found)])
    assert found == b"s" * 50 * unit
    backend.ranges.check_integrity()
    backend.close()


def test_offsets_are_refused_that_are_not_allocated():
    ranges = OffsetAllocator(1024)
    offset = ranges.allocate(100)
    for wrong in (offset + 64, -64, 1 << 40, "0", None, 0.0, True):
        with pytest.raises(BlockError, match="nothing is allocated"):
            ranges.deallocate(wrong)
    ranges.deallocate(offset)
    with pytest.raises(BlockError, match="nothing is allocated"):
        ranges.deallocate(offset)
    for size in (0, -1, 1.5, "1", None, True):
        with pytest.raises(BlockError, match="bytes asked for"):
            ranges.allocate(size)
    with pytest.raises(OutOfMemoryError, match="1024 of 1024 are free"):
        ranges.allocate(1025)
    with pytest.raises(ConfigError):
        OffsetAllocator(-1)


@pytest.mark.parametrize("num_operations", [10_000, pytest.param(1_000_000, marks=pytest.mark.full)])
def test_random_ranges_never_overlap_and_are_joined(num_operations):
    random = Randomness(0).stream("ranges")
    ranges = OffsetAllocator(1 << 16)
    held: dict[int, int] = {}
    for step in range(num_operations):
        if random.random() < 0.5:
            size = random.randint(1, 4000)
            try:
                offset = ranges.allocate(size)
            except OutOfMemoryError:
                assert ranges.largest_free_bytes < -(-size // 64) * 64
            else:
                held[offset] = size
        elif held:
            offset = random.choice(list(held)) if step % 100 == 0 else next(iter(held))
            del held[offset]
            ranges.deallocate(offset)
        if step % 100 == 0:
            ranges.check_integrity()
            assert ranges.offsets() == sorted(held)
    for offset in held:
        ranges.deallocate(offset)
    assert ranges.largest_free_bytes == ranges.free_bytes == 1 << 16


def storage(clock, **tiers: int) -> TieredKVStorage:
    made = {name: BackendTier(DDRBackend(num_bytes)) for name, num_bytes in tiers.items()}
    return TieredKVStorage(made, clock=clock)


def test_a_full_tier_moves_its_coldest_block_down_and_the_last_one_drops():
    clock = VirtualClock()
    tiered = storage(clock, host=1000, file=1000)
    for number in range(5):
        clock.advance_ns(10**9)
        assert put(tiered, make_header(number), make_data(number)) == "done"
    levels = [tiered.level_of(make_header(number).key) for number in range(5)]
    assert levels[-1] == 0
    assert levels == sorted(levels, key=lambda level: -9 if level is None else -level)
    assert None in levels
    metrics = tiered.metrics()
    assert metrics.num_demoted >= 2
    assert metrics.num_dropped == levels.count(None)
    for number, level in enumerate(levels):
        expected = "missing" if level is None else "done"
        assert get(tiered, make_header(number))[0] == expected
    tiered.check_integrity()


def test_what_is_used_often_stays_above_though_it_came_first():
    clock = VirtualClock()
    tiered = storage(clock, host=2048, file=8192)
    put(tiered, make_header(0), make_data(0))
    for number in range(1, 12):
        clock.advance_ns(400 * 10**9)
        get(tiered, make_header(0))
        put(tiered, make_header(number), make_data(number))
    assert tiered.level_of(make_header(0).key) == 0


def test_a_hot_block_comes_up_where_there_is_room():
    clock = VirtualClock()
    tiered = storage(clock, host=1024, file=8192)
    for number in range(3):
        clock.advance_ns(10**9)
        put(tiered, make_header(number), make_data(number))
    assert tiered.level_of(make_header(0).key) == 1
    run_to_end(tiered, [TierRequest("delete", make_header(2))])
    run_to_end(tiered, [TierRequest("delete", make_header(1))])
    for _ in range(3):
        assert get(tiered, make_header(0)) == ("done", bytes(make_data(0)))
    assert tiered.level_of(make_header(0).key) == 0
    assert tiered.metrics().num_promoted == 1
    tiered.check_integrity()


def test_what_leaves_the_device_goes_to_the_first_tier_even_from_below():
    tiered = storage(VirtualClock(), host=1024, file=8192)
    for number in range(4):
        assert put(tiered, make_header(number), make_data(number)) == "done"
    keys = [make_header(number).key for number in range(5)]
    levels = [tiered.level_of(key) for key in keys]
    assert (levels[0], levels[3], levels[4]) == (1, 0, None)
    assert tiered.touch(keys) == [level != 0 for level in levels]
    assert put(tiered, make_header(0), make_data(0)) == "done"
    assert tiered.level_of(keys[0]) == 0
    for number in range(4):
        assert get(tiered, make_header(number)) == ("done", bytes(make_data(number)))
    tiered.check_integrity()


def test_what_is_touched_goes_last():
    host = BackendTier(DDRBackend(1 << 16))
    tiered = TieredKVStorage({"host": host}, clock=VirtualClock())
    first = make_header(0).key
    put(tiered, make_header(0), make_data(0))
    for number in range(1, 1000):
        assert tiered.touch([first]) == [False]
        put(tiered, make_header(number), make_data(number))
    assert tiered.metrics().num_dropped > 0
    assert tiered.contains(first)
    assert not tiered.contains(make_header(1).key)
    tiered.check_integrity()


def test_the_classifier_follows_its_order():
    classify = HotColdClassifier(
        hot_frequency_threshold=1.0, warm_frequency_threshold=0.1, cold_timeout_s=100
    ).classify
    assert classify(0.5, 0.0) == "hot"
    assert classify(1_000, 1.0) == "hot"
    assert classify(101, 0.9) == "cold"
    assert classify(51, 0.05) == "cold"
    assert classify(51, 0.2) == "warm"
    assert classify(49, 0.05) == "warm"


def test_thresholds_follow_what_is_observed():
    classifier = HotColdClassifier(cold_timeout_s=300)
    for _ in range(10 * 512):
        classifier.observe_gap(20.0)
        classifier.observe_frequency(0.5)
    assert classifier.cold_timeout_s == pytest.approx(20, rel=0.1)
    assert classifier.hot_frequency_threshold == pytest.approx(0.5, rel=0.1)
    fixed = HotColdClassifier(adapts=False)
    for _ in range(1000):
        fixed.observe_gap(20.0)
        fixed.observe_frequency(0.5)
    assert (fixed.cold_timeout_s, fixed.hot_frequency_threshold) == (300, 0.1)


def test_thresholds_follow_a_load_that_becomes_faster():
    clock, thresholds = VirtualClock(), []
    tiered = storage(clock, host=1 << 14, file=1 << 15)
    for gap_s in (10.0, 0.5):
        for number in range(1200):
            clock.advance_ns(round(gap_s * 1e9))
            put(tiered, make_header(round(number + 1e6 * gap_s)), make_data(0))
        thresholds.append(tiered.classifier.hot_frequency_threshold)
    assert 10 < thresholds[1] / thresholds[0] < 30, "20 times as fast"
    tiered.check_integrity()


@pytest.mark.parametrize("seed", range(20))
def test_a_block_on_its_way_down_can_be_asked_for(seed):
    host, file = BackendTier(DDRBackend(1000)), late(file_tier(1 << 20), seed)
    tiered = TieredKVStorage({"host": host, "file": file}, clock=VirtualClock())
    headers = [make_header(number) for number in range(8)]
    tickets = {
        tiered.submit([TierRequest("put", header, make_data(number))]): number
        for number, header in enumerate(headers)
    }
    assert all(tiered.contains(header.key) for header in headers)
    data = [memoryview(bytearray(BLOCK_BYTES)) for _ in headers]
    asked = [TierRequest("get", header, buffer) for header, buffer in zip(headers, data, strict=True)]
    assert run_to_end(tiered, asked) == ("done",) * 8
    assert data == [make_data(number) for number in tickets.values()]
    tiered.check_integrity()


@pytest.mark.parametrize("seed", range(5))
def test_random_operations_over_tiers_that_fail_agree_with_a_model(seed):
    tiers = {
        "host": late(BackendTier(DDRBackend(10 * 4096)), seed, 0.05),
        "file": late(file_tier(20 * 4096), seed + 100, 0.05),
    }
    tiered = TieredKVStorage(tiers, clock=VirtualClock())
    machine = KVTierMachine(tiered, Randomness(seed).stream("operations"))
    machine.run(5_000, check_every=10)
    assert machine.num_hits > 100
    tiered.close()


class RaisingTier(LateKVTier):
    """Raises in every call of a method from the given one on, whatever it has begun."""

    def __init__(self, method: str, number: int, seed: int) -> None:
        super().__init__(BackendTier(DDRBackend(10 * 4096)), Random(seed))
        honest, calls = getattr(self, method), count(1)

        def call(*args):
            if next(calls) >= number:
                raise SystemExit(method)
            return honest(*args)

        setattr(self, method, call)


@pytest.mark.parametrize("number", [1, 40])
@pytest.mark.parametrize(
    "method", ["submit", "poll", "contains", "get_cost_ns", "metrics", "stored", "close"]
)
def test_a_tier_that_raises_is_given_up_and_the_others_go_on(method, number, caplog):
    tiers = {"broken": RaisingTier(method, number, seed=number), "file": file_tier(20 * 4096)}
    tiered = TieredKVStorage(tiers, clock=VirtualClock())
    machine = KVTierMachine(tiered, Randomness(number).stream("operations"))
    machine.run(2_000, check_every=10_000)
    assert machine.num_hits > 100
    assert tiered.get_cost_ns([make_header(1).key]) >= 0
    tiered.metrics()
    tiered.close()
    logged = [each for each in caplog.messages if "'broken' failed and is no longer used" in each]
    assert logged == caplog.messages
    assert len(logged) == 1 or number > 1
    assert (tiered.metrics().tiers["broken"].num_failed > 0) == bool(logged)


@pytest.mark.parametrize(
    ("method", "returned"),
    [
        ("submit", None),
        ("poll", None),
        ("poll", [None]),
        ("poll", [TierResult(Ticket(0), ())]),
        ("poll", (1 / 0 for _ in (1,))),
    ],
    ids=["no ticket", "nothing", "no results", "fewer outcomes", "a generator that raises"],
)
def test_a_tier_whose_answer_makes_no_sense_is_given_up(method, returned, caplog):
    tier = BackendTier(DDRBackend(1 << 16))
    tiered = TieredKVStorage({"broken": tier, "file": file_tier(20 * 4096)}, clock=VirtualClock())
    setattr(tier, method, lambda *_: returned)
    assert run_to_end(tiered, [TierRequest("put", make_header(1), make_data(1))]) == ("done",)
    assert len([each for each in caplog.messages if "'broken' failed and is no longer used" in each]) == 1
    assert tiered.metrics().tiers["broken"].num_failed > 0
    tiered.close()


def test_many_requests_for_one_block_wait_for_each_other():
    tiered = TieredKVStorage({"host": BackendTier(DDRBackend(1 << 16))}, clock=VirtualClock())
    request = TierRequest("put", make_header(1), make_data(1))
    assert run_to_end(tiered, [request] * 5_000) == ("done",) * 5_000
    tiered.check_integrity()


def test_a_size_in_place_of_a_tier_is_refused_at_once():
    with pytest.raises(ConfigError, match=r"tier 'host' is '4GiB'; .*methods of KVTierProtocol"):
        TieredKVStorage({"host": "4GiB"})
