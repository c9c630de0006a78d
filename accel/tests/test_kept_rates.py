"""Rates of a machine in a file: kept for the same machine, never trusted from others, never in the way."""

import json
import os
import threading
from pathlib import Path

import pytest

from sagellm.accel.kept_rates import KeptRates, machine_key, rates_file

RATES = {"gflops": 12.5, "min_rows": None}
CPUINFO = "processor : 0\nmodel name : Some CPU\nflags : avx2 fma {more}\n"


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "cache" / "rates.json"


def test_what_was_kept_is_there_for_the_same_machine_alone(path):
    KeptRates(path, "this").put("products", RATES)
    assert KeptRates(path, "this").get("products") == RATES
    assert KeptRates(path, "another").get("products") is None
    assert KeptRates(path, "this").get("others") is None


def test_machines_that_share_a_home_keep_their_own(path):
    for machine in ("one", "two"):
        KeptRates(path, machine).put("products", {"gflops": float(len(machine))})
    assert KeptRates(path, "one").get("products") == KeptRates(path, "two").get("products") == {"gflops": 3.0}


def test_the_file_keeps_the_latest_of_many_machines(path):
    for number in range(70):
        KeptRates(path, str(number)).put("products", RATES)
    assert KeptRates(path, "5").get("products") is None
    assert KeptRates(path, "6").get("products") == KeptRates(path, "69").get("products") == RATES


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"products; this": 5}', b"[" * 100_000),
        *(b'{"products; this": {"gflops": "12"}}', b'{"products; this": {"gflops": true}}'),
        *(b'{"products; this": {"gflops": -1}}', b'{"products; this": {"gflops": NaN}}'),
        b'{"products; this": {"gflops": Infinity}}',
        b'{"products; this": {"gflops": 1.0}, "more": "' + b"x" * (1 << 16) + b'"}',
    ],
)
def test_a_damaged_or_foreign_file_is_passed_over_and_replaced(path, content):
    path.parent.mkdir(mode=0o700)
    path.write_bytes(content)
    kept = KeptRates(path, "this")
    assert kept.get("products") is None
    kept.put("products", RATES)
    assert kept.get("products") == RATES


@pytest.mark.parametrize("writers", [0o020, 0o002])
def test_nothing_is_taken_from_where_others_can_write(path, writers):
    kept = KeptRates(path, "this")
    kept.put("products", RATES)
    path.parent.chmod(0o700 | writers)
    assert kept.get("products") is None
    kept.put("products", {"gflops": 1.0})
    path.parent.chmod(0o700)
    assert kept.get("products") == RATES, "nothing was written there either"
    path.chmod(0o600 | writers)
    assert kept.get("products") is None


def test_a_link_and_a_pipe_are_passed_over(path, tmp_path):
    kept = KeptRates(path, "this")
    kept.put("products", RATES)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert kept.get("products") is None
    path.unlink()
    os.mkfifo(path)
    assert kept.get("products") is None


def test_the_file_of_another_owner_is_passed_over(path, monkeypatch):
    kept = KeptRates(path, "this")
    kept.put("products", RATES)
    monkeypatch.setattr(os, "getuid", lambda: 12_345)
    assert kept.get("products") is None


def test_no_folder_is_made_in_the_home_of_another(path, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 12_345)
    KeptRates(path, "this").put("products", RATES)
    assert not path.parent.exists()


def test_what_cannot_be_written_is_measured_again(tmp_path):
    (tmp_path / "file").write_text("")
    kept = KeptRates(tmp_path / "file" / "rates.json", "this")
    kept.put("products", RATES)
    assert kept.get("products") is None


def test_the_folder_and_the_file_are_their_owners_alone_and_no_other_file_is_left(path):
    KeptRates(path, "this").put("products", RATES)
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_file_alone(path, monkeypatch):
    kept = KeptRates(path, "this")
    kept.put("products", RATES)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    kept.put("products", {"gflops": 1.0})
    assert kept.get("products") == RATES
    assert list(path.parent.iterdir()) == [path]


def test_readers_and_writers_at_once_see_whole_files(path):
    KeptRates(path, "this").put("products", RATES)
    threads = [
        threading.Thread(target=lambda: [KeptRates(path, "this").put("products", RATES) for _ in range(50)])
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    seen = []
    while any(thread.is_alive() for thread in threads):
        seen.append(KeptRates(path, "this").get("products"))
    assert all(each == RATES for each in seen)
    json.loads(path.read_text())


def test_the_file_is_in_the_users_cache_unless_one_is_named_or_it_is_off():
    assert rates_file({"XDG_CACHE_HOME": "/c"}) == Path("/c/sagellm/rates.json")
    assert rates_file({}) == Path.home() / ".cache" / "sagellm" / "rates.json"
    assert rates_file({"SAGELLM_RATES_FILE": "/r.json", "XDG_CACHE_HOME": "/c"}) == Path("/r.json")
    assert rates_file({"SAGELLM_RATES_FILE": "off", "XDG_CACHE_HOME": "/c"}) is None
    KeptRates(None, "this").put("products", RATES)
    assert KeptRates(None, "this").get("products") is None


def test_a_key_names_the_cpu_the_software_and_what_limits_instructions(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(CPUINFO.format(more=""))
    plain = machine_key({}, cpuinfo)
    assert "Some CPU" in plain
    assert f"{os.cpu_count()} CPUs" in plain
    assert "torch " in plain
    assert machine_key({"ONEDNN_MAX_CPU_ISA": "AVX2"}, cpuinfo) != plain
    cpuinfo.write_text(CPUINFO.format(more="avx512f"))
    assert machine_key({}, cpuinfo) != plain, "hypervisors give different CPUs one name"
    assert machine_key({}, tmp_path / "none")
