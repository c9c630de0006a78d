"""The pool of threads, by a program that walks teams through phases."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from native_build import load_build

NATIVE = Path(__file__).parents[2] / "native"
PROGRAM = Path(__file__).with_name("team_test.cpp")


def run(folder: Path, *options: str, arguments: tuple[str, ...] = ()) -> None:
    cxx = load_build().compiler()
    if cxx is None or not NATIVE.exists():
        pytest.skip("no C++ compiler, or no sources, to build the program from")
    target = folder / "team"
    warnings = ["-Wall", "-Wextra", "-Werror"]
    command = [cxx, "-std=c++17", "-mavx2", *options, *warnings, "-pthread", f"-I{NATIVE}"]
    subprocess.run([*command, str(PROGRAM), str(NATIVE / "team.cpp"), "-o", str(target)], check=True)
    result = subprocess.run([target, *arguments], capture_output=True, text=True, timeout=500, check=False)
    assert result.returncode == 0, result.stderr


def test_each_phase_runs_each_item_once_on_any_number_of_threads_and_after_a_fork(tmp_path):
    run(tmp_path, "-O1")


@pytest.mark.full
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_a_team_has_no_race_and_no_bad_access(tmp_path, sanitizer):
    # The thread sanitizer cannot follow a fork that starts threads: an argument leaves it out.
    arguments = ("without-fork",) if sanitizer == "thread" else ()
    run(tmp_path, "-O1", "-g", f"-fsanitize={sanitizer}", arguments=arguments)
