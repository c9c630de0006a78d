"""Files that hold what users wrote are theirs alone, and no head of one can do harm."""

from __future__ import annotations

import os
import stat
import struct
import subprocess
import sys

import pytest

from sagellm.core import ConfigError, Randomness
from sagellm.core.random_access import SystemRandomAccessFile
from sagellm.core.store_key import StoreKey
from sagellm.kvmgr.kv_pool.tiers.backend_tier import BackendTier
from sagellm.kvmgr.kv_pool.tiers.backends import NVMeBackend
from sagellm.kvmgr.kv_pool.tiers.providers import default_folder, file_tier
from sagellm.kvmgr.kv_pool.tiers.record import RecordFormat
from sagellm.testing.kv_tier import get, make_data, make_header, put

UNIT = 4096


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def close_full(tier):
    for number in range(8):
        put(tier, make_header(number), make_data(number))
    tier.close()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_folder_and_file_are_the_users_alone_whatever_the_umask(tmp_path, umask):
    previous = os.umask(umask)
    try:
        tier = file_tier(1 << 20, folder=str(tmp_path / "a" / "kv"), name="chats")
    finally:
        os.umask(previous)
    close_full(tier)
    assert mode_of(tmp_path / "a" / "kv") == 0o700
    assert mode_of(tmp_path / "a" / "kv" / "chats.kv") == 0o600


def test_the_default_folder_is_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tier = file_tier(1 << 20)
    assert default_folder() == tmp_path / "sagellm" / "kv"
    assert mode_of(default_folder()) == 0o700
    assert list(default_folder().iterdir()) == []
    tier.close()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    tier = file_tier(1 << 20, folder="~/mine")
    assert mode_of(tmp_path / "mine") == 0o700
    tier.close()


def test_a_file_that_others_could_read_is_taken_from_them(tmp_path):
    close_full(file_tier(1 << 20, folder=str(tmp_path), name="chats"))
    (tmp_path / "chats.kv").chmod(0o644)
    tier = file_tier(1 << 20, folder=str(tmp_path), name="chats")
    assert mode_of(tmp_path / "chats.kv") == 0o600
    assert tier.metrics().num_blocks == 8
    tier.close()


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "/etc/x", "a/b", "a\\b", "a\0b", ".hidden", "a b", 5, True]
)
def test_a_name_is_no_path(tmp_path, name):
    with pytest.raises(ConfigError, match="no path"):
        file_tier(1 << 20, folder=str(tmp_path / "kv"), name=name)
    assert not (tmp_path / "kv").exists()


def test_a_name_that_is_too_long_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="too long"):
        file_tier(1 << 20, folder=str(tmp_path), name="x" * 300)


@pytest.mark.parametrize("kind", ["link", "link to nothing", "second name", "pipe", "folder"])
def test_what_is_not_ones_own_plain_file_is_refused_and_left_alone(tmp_path, kind):
    victim, path = tmp_path / "victim", tmp_path / "chats.kv"
    victim.write_bytes(b"mine" * 5000)
    {
        "link": lambda: path.symlink_to(victim),
        "link to nothing": lambda: path.symlink_to(tmp_path / "nothing"),
        "second name": lambda: path.hardlink_to(victim),
        "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
    }[kind]()
    with pytest.raises(ConfigError, match=r"KV file chats\.kv .* cannot be opened"):
        file_tier(UNIT, folder=str(tmp_path), name="chats")
    assert victim.read_bytes() == b"mine" * 5000
    assert not (tmp_path / "nothing").exists()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="gives a file to somebody else")
def test_somebody_elses_file_is_refused(tmp_path):
    path = tmp_path / "chats.kv"
    path.write_bytes(b"theirs")
    path.chmod(0o666)
    os.chown(path, 12345, 12345)
    with pytest.raises(ConfigError, match="it belongs to user 12345"):
        file_tier(1 << 20, folder=str(tmp_path), name="chats")
    assert (path.read_bytes(), mode_of(path)) == (b"theirs", 0o666)
    with pytest.raises(PermissionError):
        SystemRandomAccessFile(str(path), is_new=False)


def test_a_smaller_quota_holds_for_the_file_that_is_there(tmp_path):
    close_full(file_tier(1 << 20, folder=str(tmp_path), name="chats"))
    assert (tmp_path / "chats.kv").stat().st_size > 3 * UNIT
    tier = file_tier(3 * UNIT, folder=str(tmp_path), name="chats")
    assert (tmp_path / "chats.kv").stat().st_size == 3 * UNIT
    assert tier.metrics().num_blocks == 3
    outcomes = [put(tier, make_header(number), make_data(number)) for number in range(20, 24)]
    assert outcomes == ["full"] * 4
    assert (tmp_path / "chats.kv").stat().st_size == 3 * UNIT
    tier.check_integrity()
    tier.close()


ENDING = """
import os, signal, sys, time
from sagellm.testing.kv_tier import make_data, make_header, put
from sagellm.kvmgr.kv_pool.tiers.providers import file_tier
tier = file_tier(1 << 20, folder=sys.argv[1])
assert put(tier, make_header(1), make_data(1)) == "done"
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "raises":
    raise SystemExit(3)
if sys.argv[2] == "at once":
    os._exit(1)
"""


@pytest.mark.parametrize("how", ["returns", "raises", "at once", "killed"])
def test_a_file_without_a_name_goes_however_its_process_ends(tmp_path, how):
    subprocess.run([sys.executable, "-c", ENDING, str(tmp_path), how], check=False)
    assert list(tmp_path.iterdir()) == []


def test_two_tiers_without_a_name_share_nothing(tmp_path):
    first, second = (file_tier(1 << 20, folder=str(tmp_path)) for _ in range(2))
    put(first, make_header(1), make_data(1))
    assert get(second, make_header(1))[0] == "missing"
    first.close()
    second.close()


def test_a_new_file_is_not_searched(tmp_path, monkeypatch):
    reads = []
    monkeypatch.setattr(SystemRandomAccessFile, "read_into", lambda *arguments: reads.append(arguments) or 0)
    file_tier(1 << 44, folder=str(tmp_path), name="large").close()
    assert not reads


def test_no_mutated_head_is_taken_or_raises():
    random = Randomness(0).stream("heads")
    data = make_data(1)
    records = RecordFormat(StoreKey(bytes(32)))
    head = records.encode_head(make_header(1), len(data), records.digest_of(make_header(1), data), 64)
    assert records.decode_head(head, 64) is not None
    lengths = (0, 1, 2**16, 2**31 - 1, 2**32 - 1)
    for _ in range(3000):
        mutated = bytearray(head)
        for _ in range(random.randint(1, 4)):
            kind, place = random.random(), random.randrange(len(mutated) - 4)
            if kind < 0.5:
                mutated[place] ^= 1 << random.randrange(8)
            elif kind < 0.8:
                mutated[place : place + 4] = struct.pack("<I", random.choice(lengths))
            else:
                mutated[place:place] = random.randbytes(random.randint(1, 70))
        if mutated != head:
            assert records.decode_head(bytes(mutated), 64) is None
    assert records.decode_head(head, 128) is None


def test_lengths_in_a_head_that_do_not_fit_are_no_record(tmp_path):
    path = tmp_path / "chats.kv"
    tier = BackendTier(NVMeBackend(str(path), 4 * UNIT, is_persistent=True))
    put(tier, make_header(1), make_data(1))
    tier.close()
    header = make_header(2)
    for num_bytes in (0, 4 * UNIT, 1 << 40, (1 << 64) - 1):
        records = RecordFormat(StoreKey.of_user())
        forged = records.encode_head(header, num_bytes, bytes(32), UNIT)  # with the seal that belongs to it
        with path.open("r+b") as file:
            file.seek(UNIT)
            file.write(forged)
        tier = BackendTier(NVMeBackend(str(path), 4 * UNIT, is_persistent=True))
        tier.recover()
        tier.check_integrity()
        assert get(tier, header)[0] in ("missing", "corrupt")
        assert get(tier, make_header(1)) == ("done", bytes(make_data(1)))
        tier.close()
