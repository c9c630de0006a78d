"""Clock, randomness and files: the real ones and the ones that replay."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from sagellm.core import InvalidInputError, Randomness, Runtime, VirtualClock
from sagellm.core.runtime import Files, MemoryFiles, SystemClock, SystemFiles


def test_virtual_time_moves_only_when_told() -> None:
    clock = VirtualClock(start_ns=5, wall_start_s=100.0)
    assert (clock.now_ns(), clock.wall_s()) == (5, 100.0)
    clock.advance_ns(2_000_000_000)
    assert (clock.now_ns(), clock.wall_s()) == (2_000_000_005, 102.0)


def test_time_does_not_go_back() -> None:
    clock = VirtualClock()
    with pytest.raises(InvalidInputError, match="cannot go back by 3 ns"):
        clock.advance_ns(-3)
    first, second = SystemClock().now_ns(), SystemClock().now_ns()
    assert first <= second


def test_wall_time_is_that_of_the_machine() -> None:
    before_s = time.time()
    assert before_s <= SystemClock().wall_s() <= time.time()


def test_a_stream_depends_on_seed_and_name_alone() -> None:
    randomness = Randomness(7)
    first = [randomness.stream("arrivals").random() for _ in range(2)]
    assert first == [Randomness(7).stream("arrivals").random()] * 2
    assert Randomness(7).stream("lengths").random() != first[0]
    assert Randomness(8).stream("arrivals").random() != first[0]


def test_the_streams_of_one_seed_stay_the_same_in_every_version() -> None:
    assert Randomness(0).stream("golden").getrandbits(64) == 13756694242286135421


def test_without_a_seed_one_is_drawn_and_can_be_repeated() -> None:
    drawn = Randomness()
    assert drawn.seed != Randomness().seed
    assert Randomness(drawn.seed).stream("x").random() == drawn.stream("x").random()


@pytest.fixture(params=["system", "memory"])
def files(request: pytest.FixtureRequest) -> Files:
    return SystemFiles() if request.param == "system" else MemoryFiles()


def test_both_kinds_of_files_behave_alike(files: Files, tmp_path: Path) -> None:
    folder = str(tmp_path)
    files.write(f"{folder}/b", b"0123456789")
    files.write(f"{folder}/a", b"old")
    files.write(f"{folder}/a", b"new")
    assert files.read(f"{folder}/a") == b"new"
    assert files.read(f"{folder}/b", 2, 3) == b"234"
    assert files.read(f"{folder}/b", 8, 5) == b"89"
    assert files.read(f"{folder}/b", 4) == b"456789"
    assert files.list(folder) == ["a", "b"]
    files.remove(f"{folder}/a")
    assert files.list(folder) == ["b"]
    for missing in (files.read, files.remove):
        with pytest.raises(FileNotFoundError):
            missing(f"{folder}/a")


def test_a_written_file_is_private_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    SystemFiles().write(str(tmp_path / "secret"), b"data")
    assert os.stat(tmp_path / "secret").st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["secret"]


def test_a_write_that_fails_leaves_the_old_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, path = SystemFiles(), tmp_path / "file"
    files.write(str(path), b"old")

    def fail(descriptor: int) -> None:
        raise OSError("device full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="device full"):
        files.write(str(path), b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_folders_in_memory_are_listed_by_their_next_part() -> None:
    files = MemoryFiles()
    for path in ("/a/x/1", "/a/x/2", "/a/y", "/ab/z"):
        files.write(path, b"")
    assert files.list("/a") == files.list("/a/") == ["x", "y"]


def test_a_virtual_runtime_replays_and_a_system_one_is_real() -> None:
    one, other = Runtime.virtual(seed=3), Runtime.virtual(seed=3)
    assert one.randomness.stream("x").random() == other.randomness.stream("x").random()
    assert one.clock.now_ns() == 0
    real = Runtime.system(seed=4)
    assert isinstance(real.clock, SystemClock)
    assert isinstance(real.files, SystemFiles)
    assert real.randomness.seed == 4
