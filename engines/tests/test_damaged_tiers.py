"""Whatever happens to KV in a tier costs time, is counted, and changes no token."""

from __future__ import annotations

import errno
import os
import random
import subprocess
from contextlib import contextmanager

import pytest
from xxhash import xxh3_128_digest

from sagellm.core import Namespace, Runtime, pack
from sagellm.core.runtime import MemoryFiles, SystemFiles
from sagellm.core.store_key import StoreKey
from sagellm.engines import SamplingParams
from sagellm.testing.patience import PATIENCE_S, wait_until

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
_random = random.Random(5)
PROMPTS = [[_random.randrange(5, 200) for _ in range(60)] for _ in range(4)]
MAGIC = b"sKV2"
HEAD = {
    "magic": (0, 4),
    "header length": (4, 8),
    "data length": (8, 16),
    "key": (16, 24),
    "name": (24, 40),
    "digest": (40, 72),
    "seal": (72, 96),
}
REGIONS = HEAD | {
    "header's magic": (96, 100),
    "group": (100, 104),
    "parent hash": (108, 124),
    "tokens": (128, 160),
    "identity": (160, 248),
    "first data": (512, 513),
    "data": (2000, 4000),
}


@pytest.fixture(scope="module")
def expected(make_engine):
    engine = make_engine(block_size=8, max_num_seqs=1, enable_prefix_caching=False)
    return [engine.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in PROMPTS]


def make(make_engine, tiers, **options):
    return make_engine(block_size=8, num_blocks=20, kv_tiers=tiers, kv_fetch="always", **options)


def run(engine):
    """Generate for all prompts, one after the other, and put all their KV into the tiers."""
    tokens = [engine.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in PROMPTS]
    engine.client.core.kv.evict(20)
    kv = engine.client.core.kv
    # A tier may store on a thread of its own.
    wait_until(lambda: kv.poll() or not kv.offload._puts)
    return tokens


def counts(engine):
    return engine.metrics().modules["kv_tier"]


class FileStore:
    """A named file of a tier, seen from outside."""

    def __init__(self, folder):
        self.folder = folder
        self.tiers = {"file": {"max_bytes": "64MiB", "folder": str(folder), "name": "kept"}}

    def records(self, engine):
        del engine
        (path,) = self.folder.iterdir()
        return _records(path.read_bytes(), 4096)

    def put(self, engine, place, record):
        del engine
        (path,) = self.folder.iterdir()
        with path.open("r+b") as file:
            file.seek(place)
            file.write(record)


class HostStore:
    """The memory of a host tier."""

    tiers = {"host": "8MiB"}  # noqa: RUF012

    def _memory(self, engine):
        (tier,) = engine.client.core.kv.offload.tiers._tiers
        return tier.tier.backend._memory

    def records(self, engine):
        return _records(bytes(self._memory(engine)), 64)

    def put(self, engine, place, record):
        self._memory(engine)[place : place + len(record)] = record


class RedisStore:
    """Values on a server."""

    def __init__(self, url):
        redis = pytest.importorskip("redis")
        self.client = redis.Redis.from_url(url)
        redis = {"max_bytes": "64MiB", "url": url, "prefix": "damaged", "timeout_s": PATIENCE_S}
        self.tiers = {"redis": redis}
        for name in self.client.scan_iter("damaged:*"):
            self.client.delete(name)

    def records(self, engine):
        del engine
        return {name: self.client.get(name) for name in self.client.scan_iter("damaged:*")}

    def put(self, engine, place, record):
        del engine
        self.client.set(place, record)


def _records(data, alignment):
    """Return what begins with the magic of a record, by where it lies."""
    places = [place for place in range(0, len(data), alignment) if data[place : place + 4] == MAGIC]
    ends = [*places[1:], len(data)]
    return {place: data[place:end] for place, end in zip(places, ends, strict=True)}


@pytest.fixture(params=["host", "file", "redis"])
def store(request, tmp_path):
    if request.param == "host":
        return HostStore()
    return (
        FileStore(tmp_path) if request.param == "file" else RedisStore(request.getfixturevalue("redis_url"))
    )


def flip(record, start, end):
    return record[:start] + bytes(byte ^ 0x24 for byte in record[start:end]) + record[end:]


def test_every_region_of_every_record_may_be_flipped(make_engine, expected, store):
    engine = make(make_engine, store.tiers)
    assert run(engine) == expected
    for name, (start, end) in REGIONS.items():
        num_corrupt, num_lost = counts(engine).tiers.num_corrupt, counts(engine).num_lost_blocks
        records = store.records(engine)
        assert len(records) >= 7 * len(PROMPTS)
        for place, record in records.items():
            store.put(engine, place, flip(record, start, end))
        assert run(engine) == expected, name
        assert counts(engine).tiers.num_corrupt >= num_corrupt + len(PROMPTS), name
        assert counts(engine).num_lost_blocks > num_lost, name
        assert run(engine) == expected, name
    assert counts(engine).num_fetched_blocks >= 7 * len(PROMPTS) * len(REGIONS)


@pytest.mark.parametrize("kind", ["swapped", "half of another", "half zeros", "all the same"])
def test_whole_records_may_be_others_or_halves(make_engine, expected, store, kind):
    engine = make(make_engine, store.tiers)
    assert run(engine) == expected
    records = store.records(engine)
    places, contents = list(records), list(records.values())
    for index, (place, record) in enumerate(records.items()):
        other, half = contents[index - 1], len(record) // 2
        damaged = {
            "swapped": other,
            "half of another": record[:half] + other[half:],
            "half zeros": record[:half] + bytes(len(record) - half),
            "all the same": contents[0],
        }[kind]
        if place != places[-1]:  # in a file the last one may be longer
            store.put(engine, place, damaged[: len(record)])
    assert run(engine) == expected
    assert counts(engine).tiers.num_corrupt > 0
    assert counts(engine).num_lost_blocks > 0
    assert run(engine) == expected
    assert counts(engine).num_fetched_blocks > 0


def negate(record):
    """Change the sign of every float32 of a block, and reseal it as an attacker without the key can."""
    size = int.from_bytes(record[8:16], "little")
    start = -(-(96 + int.from_bytes(record[4:8], "little")) // 64) * 64
    data = bytearray(record[start : start + size])
    data[3::4] = bytes(byte ^ 0x80 for byte in data[3::4])
    head = bytearray(record[:start])
    head[40:72] = 2 * xxh3_128_digest(data)
    head[72:96] = StoreKey.fresh().digest(b"head", bytes(8), head[:72], size=24)
    return bytes(head + data + record[start + size :])


@pytest.mark.parametrize("store", ["file", "redis"], indirect=True)
@pytest.mark.parametrize("is_new_engine", [False, True])
def test_negated_kv_with_recomputed_checksums_changes_no_token(make_engine, expected, store, is_new_engine):
    engine = make(make_engine, store.tiers)
    run(engine)
    for place, record in store.records(engine).items():
        store.put(engine, place, negate(record))
    if is_new_engine:
        engine = make(make_engine, store.tiers)
    num_fetched = counts(engine).num_fetched_blocks
    assert run(engine) == expected
    assert counts(engine).num_fetched_blocks == num_fetched
    assert counts(engine).tiers.num_corrupt > 0
    assert run(engine) == expected
    assert counts(engine).num_fetched_blocks > num_fetched


@pytest.mark.parametrize("store", ["file", "redis"], indirect=True)
def test_an_engine_with_another_key_finds_nothing_and_reports_it(
    make_engine, expected, store, tmp_path_factory
):
    keys = tmp_path_factory.mktemp("keys")
    for name in ("old", "new"):
        (keys / name).write_text(name.encode().hex().ljust(64, "0"))
        (keys / name).chmod(0o600)
    run(make(make_engine, store.tiers, kv_store_key=str(keys / "old")))
    for name in ("new", "old"):
        engine = make(make_engine, store.tiers, kv_store_key=str(keys / name))
        found = counts(engine).tiers.tiers[next(iter(store.tiers))]
        assert (found.num_blocks >= 7 * len(PROMPTS)) == (name == "old")
        assert (found.num_foreign >= 7 * len(PROMPTS)) == (name == "new")
        if name == "old":
            assert run(engine) == expected
            assert counts(engine).num_fetched_blocks >= 7 * len(PROMPTS)
        engine.close()


@pytest.mark.parametrize("store", ["file", "redis"], indirect=True)
def test_no_store_reveals_tokens_or_tenants(make_engine, store):
    engine = make(make_engine, store.tiers)
    for prompt in PROMPTS:
        engine.generate(prompt, GREEDY, namespace=Namespace("the-tenant", "the-salt"))
    engine.client.core.kv.evict(20)
    headers = [header for header, _ in engine.client.core.kv.offload.tiers._tiers[0].stored()]
    records = store.records(engine)
    assert records
    stored = b"".join((str(place).encode() + record) for place, record in records.items())
    for known in (b"the-tenant", b"the-salt", pack(PROMPTS[0][:8]).data, *(each.hash for each in headers)):
        assert known not in stored
        assert known.hex().encode() not in stored


@pytest.mark.parametrize("is_new_engine", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.77])
def test_a_file_may_be_cut(make_engine, expected, tmp_path, is_new_engine, share):
    store = FileStore(tmp_path)
    engine = make(make_engine, store.tiers)
    run(engine)
    (path,) = tmp_path.iterdir()
    os.truncate(path, int(path.stat().st_size * share) // 4096 * 4096 + 1000)
    if is_new_engine:
        engine = make(make_engine, store.tiers)
    assert run(engine) == expected
    if not is_new_engine:
        assert counts(engine).tiers.num_corrupt > 0
        assert counts(engine).num_lost_blocks > 0
    assert run(engine) == expected  # finds what is left of a record whose prefix was gone
    num_fetched = counts(engine).num_fetched_blocks
    assert run(engine) == expected
    assert counts(engine).num_fetched_blocks >= num_fetched + 7 * len(PROMPTS)


@pytest.mark.parametrize("region", REGIONS)
def test_the_next_engine_takes_no_damaged_record(make_engine, expected, tmp_path, region):
    store = FileStore(tmp_path)
    engine = make(make_engine, store.tiers)
    run(engine)
    for place, record in store.records(engine).items():
        store.put(engine, place, flip(record, *REGIONS[region]))
    engine = make(make_engine, store.tiers)
    found = counts(engine).tiers.tiers["file"].num_blocks
    assert (found > 0) == region.endswith("data")  # a head that is wrong is not found at all
    assert run(engine) == expected
    assert counts(engine).num_fetched_blocks == 0
    assert counts(engine).tiers.num_corrupt >= len(PROMPTS) * bool(found)
    assert run(engine) == expected
    assert counts(engine).num_fetched_blocks >= 7 * len(PROMPTS)


@pytest.mark.parametrize("value", [b"", b"x", MAGIC, MAGIC + b"\xff" * 60, bytes(1 << 20), None, ["a list"]])
def test_a_server_may_answer_anything(make_engine, expected, redis_url, value):
    store = RedisStore(redis_url)
    engine = make(make_engine, store.tiers)
    run(engine)
    names = list(store.records(engine))
    for name in names:
        store.client.delete(name)
        if isinstance(value, list):
            store.client.rpush(name, *value)
        elif value is not None:
            store.client.set(name, value)
    assert run(engine) == expected
    metrics = counts(engine)
    assert metrics.num_lost_blocks > 0
    assert (metrics.tiers.num_corrupt > 0) == (isinstance(value, bytes) and value != b"")
    assert (metrics.tiers.num_failed > 0) == isinstance(value, list)
    assert run(engine) == expected
    engine = make(make_engine, store.tiers)  # which finds these values
    assert run(engine) == expected


class Disk(MemoryFiles):
    """Files that are full after some bytes, or cannot be read, when they are told so."""

    def __init__(self):
        super().__init__()
        self.bytes_left, self.fails_to_read = 1 << 40, False

    def open(self, path, *, is_new):
        disk, file = self, super().open(path, is_new=is_new)
        write, read_into = file.write, file.read_into

        def failing_write(offset, buffers):
            data = b"".join(buffers)
            write(offset, [data[: disk.bytes_left]])
            disk.bytes_left = max(0, disk.bytes_left - len(data))
            if not disk.bytes_left:
                raise OSError(errno.ENOSPC, "No space left on device")

        def failing_read(offset, buffers):
            if disk.fails_to_read:
                for buffer in buffers:
                    buffer[: len(buffer) // 2] = bytes(len(buffer) // 2)
                raise OSError(errno.EIO, "Input/output error")
            return read_into(offset, buffers)

        file.write, file.read_into = failing_write, failing_read
        return file


def on_disk(make_engine, disk, tiers):
    system = Runtime.system(seed=0)
    runtime = Runtime(clock=system.clock, randomness=system.randomness, files=disk)
    return make(make_engine, tiers, runtime=runtime)


def test_what_a_full_disk_cannot_take_goes_below_it(make_engine, expected, all_blocks_are_back, tmp_path):
    disk = Disk()
    engine = on_disk(
        make_engine, disk, {"file": {"max_bytes": "64MiB", "folder": str(tmp_path)}, "host": "64MiB"}
    )
    disk.bytes_left = 100_000
    assert run(engine) == expected
    assert run(engine) == expected
    metrics = counts(engine)
    assert metrics.tiers.num_failed > 0
    assert metrics.tiers.num_fallbacks > 0
    assert all(tier.num_blocks > 3 for tier in metrics.tiers.tiers.values())
    assert metrics.num_lost_blocks == 0
    assert metrics.num_fetched_blocks == 7 * len(PROMPTS)
    assert all_blocks_are_back(engine)


def test_a_disk_that_is_full_and_alone_costs_time_only(make_engine, expected, all_blocks_are_back, tmp_path):
    disk = Disk()
    engine = on_disk(make_engine, disk, {"file": {"max_bytes": "64MiB", "folder": str(tmp_path)}})
    disk.bytes_left = 100_000
    for _ in range(2):
        assert run(engine) == expected
    assert counts(engine).tiers.num_failed > 0
    assert 0 < counts(engine).num_fetched_blocks < 7 * len(PROMPTS)
    disk.bytes_left = 1 << 40
    for _ in range(2):
        assert run(engine) == expected
    assert counts(engine).num_fetched_blocks > 7 * len(PROMPTS)
    assert all_blocks_are_back(engine)


def test_a_disk_that_cannot_be_read_costs_time_only(make_engine, expected, all_blocks_are_back, tmp_path):
    disk = Disk()
    engine = on_disk(make_engine, disk, {"file": {"max_bytes": "64MiB", "folder": str(tmp_path)}})
    assert run(engine) == expected
    disk.fails_to_read = True
    assert run(engine) == expected
    assert counts(engine).num_lost_blocks > 0
    assert counts(engine).tiers.num_failed > 0
    assert counts(engine).num_fetched_blocks == 0
    disk.fails_to_read = False
    for _ in range(2):
        assert run(engine) == expected
    assert counts(engine).num_fetched_blocks > 0
    assert all_blocks_are_back(engine)


@contextmanager
def small_disk(folder):
    """A file system of 200 KiB, as root may make one."""
    command = ["mount", "-t", "tmpfs", "-o", "size=200k", "none", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("nothing can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_file_system_that_is_really_full_loses_nothing(make_engine, expected, tmp_path):
    with small_disk(tmp_path):
        tiers = {"file": {"max_bytes": "64MiB", "folder": str(tmp_path)}, "host": "64MiB"}
        engine = make(
            make_engine, tiers, runtime=Runtime(**vars(Runtime.system(seed=0)) | {"files": SystemFiles()})
        )
        for _ in range(2):
            assert run(engine) == expected
        metrics = counts(engine)
        assert metrics.tiers.tiers["file"].num_failed > 0
        assert all(tier.num_blocks > 3 for tier in metrics.tiers.tiers.values())
        assert (metrics.num_lost_blocks, metrics.num_fetched_blocks) == (0, 7 * len(PROMPTS))


@pytest.mark.parametrize("fails_at", ["put", "get"])
def test_a_host_without_memory_for_kv_in_transit_recomputes_it(
    make_engine, expected, all_blocks_are_back, monkeypatch, fails_at
):
    def fail(_):
        raise MemoryError

    engine = make(make_engine, {"host": "8MiB"})
    offload = engine.client.core.kv.offload
    if fails_at == "put":
        monkeypatch.setattr(type(offload), "_take_buffer", fail)
    assert run(engine) == expected
    monkeypatch.setattr(type(offload), "_take_buffer", fail)
    assert run(engine) == expected
    assert all_blocks_are_back(engine)
    metrics = offload.metrics()
    assert (metrics.num_not_kept_blocks > 0) == (fails_at == "put")
    assert (metrics.num_lost_blocks > 0) == (fails_at == "get")
    assert metrics.num_fetched_blocks == 0
