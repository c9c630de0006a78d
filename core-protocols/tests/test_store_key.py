"""The key of stored KV is made once, is its user's alone, and is shown nowhere."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from sagellm.core import ConfigError, Randomness
from sagellm.core.store_key import StoreKey

SECRET = "5eC2e7" + "0" * 58


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SAGELLM_RUNTIME_DIR", str(tmp_path / "runtime"))
    return tmp_path / "runtime"


def test_the_users_key_is_created_once_and_only_its_owner_can_read_it(folder):
    previous = os.umask(0)
    try:
        first = StoreKey.of_user()
    finally:
        os.umask(previous)
    (path,) = folder.iterdir()
    assert (path.name, stat.S_IMODE(path.stat().st_mode)) == ("kv.key", 0o600)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert len(bytes.fromhex(path.read_text())) == 32
    assert StoreKey.of_user().id == first.id
    path.unlink()
    assert StoreKey.of_user().id != first.id


def test_of_many_concurrent_starts_one_creates_the_key(folder):
    with ThreadPoolExecutor(16) as threads:
        ids = {key.id for key in threads.map(lambda _: StoreKey.of_user(), range(64))}
    assert len(ids) == 1
    assert [path.name for path in folder.iterdir()] == ["kv.key"]


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o666])
def test_a_key_that_others_can_read_or_write_is_refused(folder, mode):
    StoreKey.of_user()
    (folder / "kv.key").chmod(mode)
    with pytest.raises(ConfigError, match=rf"kv.key, has mode 0{mode:o} .*chmod 600"):
        StoreKey.of_user()


def test_a_link_in_the_runtime_folder_is_not_followed(folder, tmp_path):
    StoreKey.of_user()
    (folder / "kv.key").rename(tmp_path / "elsewhere")
    (folder / "kv.key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"cannot be read or created: .*symbolic links"):
        StoreKey.of_user()


@pytest.mark.parametrize("content", ["", "x" * 64, SECRET[:-1], SECRET + "0", "é" * 64, SECRET * 1000])
def test_an_invalid_key_is_refused_and_not_shown(tmp_path, monkeypatch, content):
    path = tmp_path / "mine"
    path.write_text(content)
    path.chmod(0o600)
    monkeypatch.setenv("MY_KEY", content)
    for source in (str(path), "env:MY_KEY"):
        with pytest.raises(ConfigError) as raised:
            StoreKey.named(source)
        assert len(content) < 32 or content[:32] not in str(raised.value)


def test_a_named_key_may_be_a_link_that_a_group_can_read(tmp_path):
    (tmp_path / "data").write_text(SECRET + "\n")
    (tmp_path / "data").chmod(0o440)  # as secrets of containers are mounted
    (tmp_path / "mine").symlink_to(tmp_path / "data")
    assert StoreKey.named(str(tmp_path / "mine")).id == StoreKey(bytes.fromhex(SECRET)).id
    (tmp_path / "data").chmod(0o444)
    with pytest.raises(ConfigError, match="others can neither read nor write"):
        StoreKey.named(str(tmp_path / "mine"))


def test_a_missing_key_is_an_error_that_says_how_to_make_one(tmp_path, monkeypatch):
    monkeypatch.delenv("MY_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"which cannot be read: No such file .*openssl rand -hex 32"):
        StoreKey.named(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"kv\.store_key is 'env:MY_KEY', and MY_KEY is not set"):
        StoreKey.named("env:MY_KEY")
    (tmp_path / "short").write_text("zz")
    (tmp_path / "short").chmod(0o600)
    with pytest.raises(ConfigError) as caught:
        StoreKey.named(str(tmp_path / "short"))
    assert "it must be 64 hexadecimal digits" in str(caught.value)
    assert str(caught.value).count("openssl rand -hex 32") == 1
    for odd in (str(tmp_path), "/dev/zero", "a\0b"):
        with pytest.raises(ConfigError):
            StoreKey.named(odd)


def test_a_key_shows_only_its_id():
    key = StoreKey(bytes.fromhex(SECRET))
    assert repr(key) == f"<StoreKey {key.id.hex()}>"
    assert SECRET[:16].lower() not in repr(key)
    assert key.id != StoreKey.fresh().id
    with pytest.raises(ConfigError, match="is 16 bytes; it must be 32"):
        StoreKey(bytes(16))


def test_digests_depend_on_key_purpose_and_every_byte():
    key, data = StoreKey(bytes(32)), bytes(100)
    digest = key.digest(b"data", data, size=32)
    assert digest == key.digest(b"data", data[:40], memoryview(data)[40:], size=32)
    others = {
        StoreKey(b"x" * 32).digest(b"data", data, size=32),
        key.digest(b"head", data, size=32),
        key.digest(b"data", data + b"\0", size=32),
        *(key.digest(b"data", data[:n] + b"\1" + data[n + 1 :], size=32) for n in range(100)),
    }
    assert len(others) == 103
    assert digest not in others


def test_the_cipher_round_trips_and_hides_its_input():
    random = Randomness(0).stream("cipher")
    key = StoreKey.fresh()
    for size in (0, 1, 63, 64, 65, 1000):
        text = random.randbytes(size)
        hidden = key.cipher(b"n" * 16, text)
        assert key.cipher(b"n" * 16, hidden) == text
        assert len(hidden) == size
        if size > 16:
            assert hidden != text
            assert key.cipher(b"m" * 16, text) != hidden
    zeros = key.cipher(b"n" * 16, bytes(256))
    assert len({zeros[start : start + 64] for start in range(0, 256, 64)}) == 4
