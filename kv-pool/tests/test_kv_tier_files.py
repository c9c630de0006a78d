from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from sagellm.core import Randomness
from sagellm.core.runtime import MemoryFiles
from sagellm.kvmgr.kv_pool.tiers.backend_tier import BackendTier
from sagellm.kvmgr.kv_pool.tiers.backends import DDRBackend, NVMeBackend
from sagellm.kvmgr.kv_pool.tiers.storage import TieredKVStorage
from sagellm.testing.kv_tier import BLOCK_BYTES, get, make_data, make_header, put

UNIT = 4096


def open_tier(path: Path, *, num_blocks: int = 16, is_persistent: bool = True) -> BackendTier:
    tier = BackendTier(NVMeBackend(str(path), num_blocks * UNIT, is_persistent=is_persistent))
    tier.recover()
    return tier


def test_a_file_is_private_and_goes_with_its_tier_unless_it_is_persistent(tmp_path):
    path = tmp_path / "tier"
    tier = open_tier(path, is_persistent=False)
    assert not path.exists()
    assert put(tier, make_header(1), make_data(1)) == "done"
    assert get(tier, make_header(1)) == ("done", bytes(make_data(1)))
    tier.close()
    open_tier(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        open_tier(path, is_persistent=False)
    assert path.exists()


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "target").write_bytes(b"mine")
    (tmp_path / "tier").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic links"):
        open_tier(tmp_path / "tier")
    assert (tmp_path / "target").read_bytes() == b"mine"


def test_a_quota_is_kept(tmp_path):
    path = tmp_path / "tier"
    tier = open_tier(path, num_blocks=4)
    outcomes = [put(tier, make_header(number), make_data(number)) for number in range(9)]
    assert outcomes == ["done"] * 4 + ["full"] * 5
    assert path.stat().st_size <= 4 * UNIT
    tier.close()


def test_a_persistent_file_is_found_again(tmp_path):
    tier = open_tier(tmp_path / "tier")
    for number in range(5):
        put(tier, make_header(number), make_data(number))
    tier.close()
    tier = open_tier(tmp_path / "tier")
    assert tier.metrics().num_blocks == 5
    for number in range(5):
        assert get(tier, make_header(number)) == ("done", bytes(make_data(number)))
    tier.check_integrity()
    assert put(tier, make_header(9), make_data(9)) == "done"
    tier.check_integrity()
    tier.close()


def test_a_place_that_cannot_be_read_keeps_nobody_from_starting(tmp_path, monkeypatch):
    tier = open_tier(tmp_path / "tier")
    for number in range(3):
        put(tier, make_header(number), make_data(number))
    tier.close()
    read = NVMeBackend.read

    def read_all_but_the_second(self, offset, parts):
        if offset == UNIT:
            raise OSError(errno.EIO, "Input/output error")
        return read(self, offset, parts)

    monkeypatch.setattr(NVMeBackend, "read", read_all_but_the_second)
    tier = open_tier(tmp_path / "tier")
    assert (tier.metrics().num_blocks, tier.metrics().num_failed) == (2, 1)
    assert [get(tier, make_header(number))[0] for number in range(3)] == ["done", "missing", "done"]
    tier.check_integrity()
    tier.close()


@pytest.mark.parametrize("recovers", [False, True])
def test_every_flipped_byte_is_a_miss_or_harmless(tmp_path, recovers):
    path = tmp_path / "tier"
    tier = open_tier(path)
    put(tier, make_header(1), make_data(1))
    original = path.read_bytes()
    num_bytes = len(original)
    num_misses = 0
    for place in range(num_bytes):
        path.write_bytes(original[:place] + bytes([original[place] ^ 0x41]) + original[place + 1 :])
        if recovers:
            tier.close()
            tier = open_tier(path)
        found, _ = get(tier, make_header(1))
        assert found in ("missing", "corrupt")
        num_misses += 1
        path.write_bytes(original)
        if not recovers:
            put(tier, make_header(1), make_data(1))
    assert num_misses == num_bytes
    if not recovers:
        assert tier.metrics().num_corrupt == num_bytes
    tier.check_integrity()
    tier.close()


def test_truncated_files_and_swapped_records_are_misses(tmp_path):
    path = tmp_path / "tier"
    for damage in ("cut in the data", "cut in the head", "empty", "swap"):
        path.unlink(missing_ok=True)
        tier = open_tier(path)
        for number in (1, 2):
            put(tier, make_header(number), make_data(number))
        data = path.read_bytes()
        path.write_bytes(
            {
                "cut in the data": data[: UNIT + 300],
                "cut in the head": data[: UNIT + 20],
                "empty": b"",
                "swap": data[UNIT:].ljust(UNIT, b"\0") + data[:UNIT],
            }[damage]
        )
        found = [get(tier, make_header(number))[0] for number in (1, 2)]
        intact = ["done"] if "cut" in damage else ["corrupt"]
        assert found == [*intact, "corrupt"], damage
        tier.check_integrity()
        tier.close()
        tier = open_tier(path)
        again = [get(tier, make_header(number))[0] for number in (1, 2)]
        assert set(again[1:]) <= {"missing", "corrupt"}, damage
        tier.close()


class FailingFiles(MemoryFiles):
    """A disk that is full, or fails to read, when it is told so."""

    def __init__(self) -> None:
        super().__init__()
        self.fails: set[str] = set()

    def open(self, path, *, is_new):
        files, file = self, super().open(path, is_new=is_new)

        class Failing(type(file)):
            def write(self, offset, buffers):
                if "write" in files.fails:
                    file.write(offset, [bytes(buffers[0])[:20]])
                    raise OSError(errno.ENOSPC, "No space left on device")
                file.write(offset, buffers)

            def read_into(self, offset, buffers):
                if "read" in files.fails:
                    raise OSError(errno.EIO, "Input/output error")
                return file.read_into(offset, buffers)

        return Failing(bytearray())


def test_a_full_disk_and_read_errors_fall_back_and_lose_nothing_else():
    files = FailingFiles()
    disk = BackendTier(NVMeBackend("/disk", 16 * UNIT, files=files))
    last = BackendTier(DDRBackend(16 * UNIT))
    tiered = TieredKVStorage({"disk": disk, "last": last})
    assert put(tiered, make_header(1), make_data(1)) == "done"
    files.fails = {"write"}
    assert put(tiered, make_header(2), make_data(2)) == "done"
    assert [tiered.level_of(make_header(number).key) for number in (1, 2)] == [0, 1]
    assert tiered.metrics().num_fallbacks == 1
    files.fails = {"read"}
    assert get(tiered, make_header(1))[0] == "failed"
    assert get(tiered, make_header(2)) == ("done", bytes(make_data(2)))
    files.fails = set()
    assert get(tiered, make_header(1))[0] == "missing"
    assert put(tiered, make_header(1), make_data(1)) == "done"
    assert disk.metrics().num_failed == 2
    tiered.check_integrity()


WRITER = """
import sys
from itertools import count
from sagellm.testing.kv_tier import make_data, make_header
from sagellm.core.protocols.kv_tier import TierRequest, run_to_end
from sagellm.kvmgr.kv_pool.tiers.backend_tier import BackendTier
from sagellm.kvmgr.kv_pool.tiers.backends import NVMeBackend

tier = BackendTier(NVMeBackend(sys.argv[1], 32 * 65536, is_persistent=True))
tier.recover()
print("ready", flush=True)
for number in count():
    run_to_end(tier, [TierRequest("put", make_header(number % 50), make_data(number % 50, 49152))])
    run_to_end(tier, [TierRequest("delete", make_header((number - 7) % 50))])
    print(number, flush=True)
"""


@pytest.mark.parametrize("num_kills", [10, pytest.param(60, marks=pytest.mark.full)])
def test_a_writer_that_is_killed_leaves_no_wrong_block(tmp_path, num_kills):
    path, random = tmp_path / "tier", Randomness(0).stream("kills")
    num_found = 0
    for _ in range(num_kills):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        for _ in range(1 + random.randrange(20)):
            assert writer.stdout.readline()
        os.kill(writer.pid, signal.SIGKILL)
        writer.communicate()
        tier = BackendTier(NVMeBackend(str(path), 32 * 65536, is_persistent=True))
        tier.recover()
        tier.check_integrity()
        for number in range(50):
            found, data = get(tier, make_header(number), 49152)
            if found == "done":
                assert data == make_data(number, 49152)
                num_found += 1
        tier.check_integrity()
        tier.close()
    assert num_found > num_kills


def test_the_device_is_asked_whether_it_would_wait(tmp_path):
    tier = open_tier(tmp_path / "tier")
    put(tier, make_header(1), make_data(1))
    key = make_header(1).key
    fast_ns = tier.get_cost_ns([key])
    rates = tier.rates()
    descriptor = os.open(tmp_path / "tier", os.O_RDONLY)
    os.fdatasync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    assert tier.get_cost_ns([key]) in (
        round(BLOCK_BYTES * 1e9 / rates["fast"]),
        round(BLOCK_BYTES * 1e9 / rates["slow"]),
    )
    assert fast_ns == round(BLOCK_BYTES * 1e9 / rates["fast"])
    tier.close()
