"""KV that leaves the process cannot be forged, and reveals nothing about prompts or tenants."""

from __future__ import annotations

import os
import struct

import pytest
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from sagellm.core import KVIdentity, Randomness
from sagellm.core.kv_block import BlockHeader
from sagellm.core.protocols.kv_tier import KVTierProtocol
from sagellm.core.store_key import StoreKey
from sagellm.kvmgr.kv_pool.tiers.backend_tier import BackendTier
from sagellm.kvmgr.kv_pool.tiers.backends import DDRBackend, NVMeBackend
from sagellm.kvmgr.kv_pool.tiers.providers import file_tier
from sagellm.kvmgr.kv_pool.tiers.record import PREFIX_BYTES, Checksums, RecordFormat, num_head_bytes
from sagellm.testing.kv_tier import BLOCK_BYTES, get, make_data, make_header, put

UNIT = 4096
FUZZ_SEED = int(os.environ.get("SAGELLM_FUZZ_SEED", "0")) * 1_000_000
MINE, THEIRS = StoreKey(b"m" * 32), StoreKey(b"t" * 32)


def open_file(path, key: StoreKey = MINE, num_blocks: int = 64) -> BackendTier:
    tier = BackendTier(NVMeBackend(str(path), num_blocks * UNIT, is_persistent=True), store_key=key)
    tier.recover()
    return tier


def negated(record: bytes) -> bytes:
    """Negate the KV of a record, as numbers of 16 bits."""
    start = num_head_bytes(make_header(1))
    data = bytes(byte ^ (0x80 if place % 2 else 0) for place, byte in enumerate(record[start:]))
    return record[:start] + data


def sealed_with(key: StoreKey | Checksums, header: BlockHeader, data: bytes, place: int) -> bytes:
    records = RecordFormat(key)
    digest = records.digest_of(header, memoryview(data))
    return records.encode_head(header, len(data), digest, place) + data


def with_unkeyed_digest(record: bytes) -> bytes:
    """Replace digest and seal by what an attacker without the key can compute."""
    digest = 2 * xxh3_128_digest(record[num_head_bytes(make_header(1)) :])
    head = record[:40] + digest + record[72:]
    return head[:72] + (3 * xxh3_64_intdigest(head[:72]).to_bytes(8, "little")) + head[96:]


@pytest.mark.parametrize("is_reopened", [False, True])
@pytest.mark.parametrize("how", ["as it is", "fresh checksums", "another key", "no key"])
def test_negated_kv_is_a_miss_whatever_its_checksums(tmp_path, how, is_reopened):
    path = tmp_path / "kv"
    tier = open_file(path)
    assert put(tier, make_header(1), make_data(1)) == "done"
    record = negated(path.read_bytes())
    data = record[num_head_bytes(make_header(1)) :]
    forged = {
        "as it is": record,
        "fresh checksums": with_unkeyed_digest(record),
        "another key": sealed_with(THEIRS, make_header(1), data, 0),
        "no key": sealed_with(Checksums(), make_header(1), data, 0),
    }[how]
    path.write_bytes(forged)
    if is_reopened:
        tier.close()
        tier = open_file(path)
    assert get(tier, make_header(1))[0] in ("missing", "corrupt")
    assert tier.metrics().num_corrupt + tier.metrics().num_foreign == 1
    tier.close()


@pytest.mark.parametrize("is_reopened", [False, True])
def test_a_record_moved_to_another_offset_is_a_miss(tmp_path, is_reopened):
    path = tmp_path / "kv"
    tier = open_file(path)
    for number in (1, 2):
        put(tier, make_header(number), make_data(number))
    data = path.read_bytes()
    path.write_bytes(data[UNIT : 2 * UNIT].ljust(UNIT, b"\0") + data[:UNIT] + data[:UNIT])
    if is_reopened:
        tier.close()
        tier = open_file(path)
        assert tier.metrics().num_blocks == 0
        assert tier.metrics().num_corrupt == 3
    for number in (1, 2):
        assert get(tier, make_header(number))[0] == ("missing" if is_reopened else "corrupt")
    tier.close()


def test_records_of_another_key_are_misses_and_counted(tmp_path, caplog):
    path = tmp_path / "kv"
    tier = open_file(path, THEIRS)
    for number in range(5):
        put(tier, make_header(number), make_data(number))
    tier.close()
    tier = open_file(path, MINE)
    assert (tier.metrics().num_foreign, tier.metrics().num_corrupt, tier.metrics().num_blocks) == (5, 0, 0)
    assert f"the KV file {path} has 5 records of another key or an older format" in caplog.text
    assert put(tier, make_header(1), make_data(1)) == "done"  # where the first of theirs was
    assert get(tier, make_header(1)) == ("done", bytes(make_data(1)))
    assert get(tier, make_header(2))[0] == "missing"
    tier.check_integrity()
    tier.close()
    tier = open_file(path, THEIRS)
    assert (tier.metrics().num_foreign, tier.metrics().num_blocks) == (1, 4)
    tier.close()


def older_record(header: BlockHeader, data: bytes) -> bytes:
    """Return a record as it was before there were keys."""
    prefix = struct.Struct("<4sIQ16sQQ")
    encoded, checksum = header.encode(), xxh3_128_digest(data)
    bare = prefix.pack(b"sKVr", len(encoded), len(data), checksum, 0, 0)
    seal = xxh3_64_intdigest(bare + encoded, 0)
    head = prefix.pack(b"sKVr", len(encoded), len(data), checksum, seal, 0) + encoded
    return head + bytes(-len(head) % 64) + data


def test_a_file_in_the_older_format_is_empty_and_not_an_error(tmp_path):
    path = tmp_path / "chats.kv"
    path.write_bytes(older_record(make_header(1), bytes(make_data(1))))
    tier = file_tier(1 << 20, folder=str(tmp_path), name="chats", store_key=MINE)
    assert (tier.metrics().num_foreign, tier.metrics().num_blocks) == (1, 0)
    assert get(tier, make_header(1))[0] == "missing"
    assert put(tier, make_header(1), make_data(1)) == "done"
    assert get(tier, make_header(1)) == ("done", bytes(make_data(1)))
    tier.close()


def test_a_file_reveals_neither_tenants_nor_tokens(tmp_path):
    path = tmp_path / "kv"
    tier = open_file(path)
    header = BlockHeader.of(
        bytes(range(16)),
        make_header(0x51525354).token_ids,
        make_header(1).namespace._replace(tenant="the-tenant", salt="the-salt"),
        KVIdentity("the-model", "the-layout", "bfloat16"),
    )
    put(tier, header, make_data(1))
    tier.close()
    stored = path.read_bytes()
    assert len(stored) > PREFIX_BYTES
    for known in (
        header.token_ids.data,
        header.token_ids.data[:4],
        header.hash,
        header.parent_hash,
        b"the-tenant",
        b"the-salt",
        b"the-model",
        RecordFormat(THEIRS).name_of(header),
    ):
        assert known not in stored
    tier = open_file(path)
    assert [found for found, _ in tier.stored()] == [header]
    tier.close()


def test_a_temporary_file_has_a_temporary_key(tmp_path):
    tiers = [BackendTier(NVMeBackend(str(tmp_path / name), UNIT)) for name in "ab"]
    ids = {tier._format._sealer.id for tier in tiers}
    assert len(ids) == 2
    assert StoreKey.of_user().id not in ids
    assert isinstance(BackendTier(DDRBackend(UNIT), store_key=MINE)._format._sealer, Checksums)


def test_forged_heads_cost_work_in_proportion_to_the_file(tmp_path):
    """Each claims 1 MiB of header, which must not be read: 8 MiB of them once took 16 s."""
    path = tmp_path / "kv"
    forged = struct.pack("<4sIQ8s16s32s24s", b"sKV2", 1 << 20, 64, MINE.id, bytes(16), bytes(32), bytes(24))
    path.write_bytes(forged.ljust(UNIT, b"\0") * 2048)
    backend = CountingBackend(str(path), 16 << 20, is_persistent=True)
    tier = BackendTier(backend, store_key=MINE)
    tier.recover()
    assert backend.num_read <= 2048 * PREFIX_BYTES
    assert tier.metrics().num_corrupt == 2048
    tier.close()


class CountingBackend(NVMeBackend):
    num_read = 0

    def read(self, offset, parts):
        self.num_read += sum(map(len, parts))
        return super().read(offset, parts)


def mutate(data: bytearray, random) -> None:
    """Change a file in one of the ways in which files were attacked or broken."""
    kind, place = random.random(), random.randrange(len(data))
    if kind < 0.45:
        data[place] ^= 1 << random.randrange(8)
    elif kind < 0.6:  # a length in a prefix
        place = place // UNIT * UNIT + random.choice((4, 8, 12))
        data[place : place + 4] = struct.pack("<I", random.choice((0, 1, 96, 1 << 16, 1 << 20, 2**32 - 1)))
    elif kind < 0.75:  # some of one record in another
        source, size = random.randrange(len(data)), random.choice((16, 96, 512, UNIT))
        data[place : place + size] = data[source : source + size]
    elif kind < 0.9:  # a whole record elsewhere
        source, target = (random.randrange(-(-len(data) // UNIT)) * UNIT for _ in range(2))
        data[target : target + UNIT] = data[source : source + UNIT]
    else:
        data[place : place + 64] = bytes(64)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("num_files", "num_blocks", "num_changes"),
    [(150, 8, 3), pytest.param(4_000, 64, 64, marks=pytest.mark.full)],
)
def test_mutated_files_give_back_what_was_put_or_nothing(tmp_path, num_files, num_blocks, num_changes):
    path, numbers = tmp_path / "kv", range(num_blocks)
    tier = open_file(path, num_blocks=num_blocks + 8)
    for number in numbers:
        put(tier, make_header(number), make_data(number))
    tier.close()
    sound = path.read_bytes()
    expected = [bytes(make_data(number)) for number in numbers]
    num_hits = num_misses = 0
    for seed in range(num_files):
        random, data = Randomness(FUZZ_SEED + seed).stream("files"), bytearray(sound)
        for _ in range(num_changes):
            mutate(data, random)
        if random.random() < 0.25:
            del data[random.randrange(len(data)) :]
        with path.open("r+b") as file:  # to write it anew would wait for the disk
            file.write(data)
            file.truncate()
        tier = open_file(path, num_blocks=num_blocks + 8)
        for number in numbers:
            outcome, found = get(tier, make_header(number))
            assert outcome != "done" or found == expected[number], f"seed {FUZZ_SEED + seed}"
            num_hits += outcome == "done"
            num_misses += outcome != "done"
        tier.check_integrity()
        _goes_on(tier)
        tier.close()
    assert num_hits > num_files
    assert num_misses > num_files


def _goes_on(tier: KVTierProtocol) -> None:
    outcome = put(tier, make_header(99), make_data(99))
    assert outcome in ("done", "full")
    if outcome == "done":
        assert get(tier, make_header(99), BLOCK_BYTES) == ("done", bytes(make_data(99)))
