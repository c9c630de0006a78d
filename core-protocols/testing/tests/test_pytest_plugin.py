"""pytest's plugin knows the marks, deselects long tests where that was asked for, and changes no others."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

MARKED = """
import pytest

@pytest.mark.alone
def test_alone(): pass

def test_quick(): pass

@pytest.mark.full
def test_long(): pass

@pytest.mark.cuda
def test_on_a_gpu(): pass
"""
OF_THE_KIT = """
from sagellm.testing import KVAllocatorContract
from sagellm.core.protocols.kv_allocator import NullKVAllocator

class TestMine(KVAllocatorContract):
    def make(self, total_blocks):
        return NullKVAllocator(total_blocks)
"""
TRACED = """
import sys
import pytest

@pytest.mark.parametrize("case", [0, 1])
def test_traced(case): assert (sys.gettrace() is None) == bool(case)
"""
CASES = """
import pytest

@pytest.mark.parametrize("case", [0, 1])
def test_cases(case): pass

def test_one(): pass
"""
ASKS = '[tool.sagellm.pytest]\ndeselect = ["full", "matrix", "cuda"]\n'


def run(folder: Path, *arguments: str) -> str:
    """Run pytest in a folder of its own and return what it says; a test that fails says `failed`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    options = ["-p", "sagellm_pytest", "-p", "no:cacheprovider", "--strict-markers", "-v"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def passed(output: str) -> list[str]:
    return re.findall(r"::(\w+) PASSED", output)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_marked.py").write_text(MARKED)
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    return tmp_path


def test_the_marks_are_known_and_strangers_tests_all_run_in_their_order(project: Path) -> None:
    assert passed(run(project)) == ["test_alone", "test_quick", "test_long", "test_on_a_gpu"]


def test_long_tests_are_deselected_where_the_nearest_pyproject_asks(project: Path) -> None:
    (project / "tests" / "pyproject.toml").write_text(ASKS)
    (project / "test_beside.py").write_text(MARKED)
    output = run(project)
    assert "2 deselected" in output
    of_the_project = ["test_alone", "test_quick", "test_long", "test_on_a_gpu"]
    assert passed(output) == [*of_the_project, "test_quick", "test_alone"]  # what measures time comes last


def test_an_expression_of_marks_decides_alone(project: Path) -> None:
    (project / "pyproject.toml").write_text(ASKS)
    assert passed(run(project, "-m", "cuda")) == ["test_on_a_gpu"]


def test_the_kits_long_tests_are_deselected_for_everybody(project: Path) -> None:
    (project / "tests" / "test_marked.py").write_text(OF_THE_KIT)
    output = run(project, "--collect-only", "-q")
    assert re.search(r"\d+/\d+ tests collected \(\d+ deselected\)", output), output


def test_a_wrong_table_is_an_error_that_names_the_file(project: Path) -> None:
    (project / "pyproject.toml").write_text('[tool.sagellm.pytest]\ndeselect = ["slow"]\n')
    output = run(project)
    wanted = "tool.sagellm.pytest.deselect is ['slow']; it must be a list of alone, full, matrix"
    assert f"pyproject.toml: {wanted}" in output


@pytest.mark.full
def test_workers_take_turns_if_a_test_is_to_run_alone(project: Path) -> None:
    pytest.importorskip("xdist")
    (project / "pyproject.toml").write_text(ASKS)
    output = run(project, "-n", "2", f"--basetemp={project / 'scratch'}")
    assert "2 passed" in output
    assert (project / "scratch" / "turn.room").exists()


@pytest.mark.full
def test_coverage_traces_the_first_case_alone_in_a_worker_too(project: Path) -> None:
    pytest.importorskip("xdist")
    pytest.importorskip("pytest_cov")
    (project / "pyproject.toml").write_text(ASKS)
    (project / "tests" / "test_marked.py").write_text(TRACED)
    output = run(project, "-n", "1", "--cov", "--cov-report=")
    assert "2 passed" in output, output


def test_the_first_cases_alone_run_where_that_is_asked_for(project: Path) -> None:
    (project / "tests" / "test_marked.py").write_text(CASES)
    assert "3 passed" in run(project, "--first-cases")  # what does not ask for marks is a stranger's
    (project / "pyproject.toml").write_text(ASKS)
    assert "2 passed, 1 deselected" in run(project, "--first-cases")


def test_workers_of_strangers_take_no_turns(project: Path) -> None:
    pytest.importorskip("xdist")
    assert "4 passed" in run(project, "-n", "2", f"--basetemp={project / 'scratch'}")
    assert not (project / "scratch" / "turn.room").exists()


def test_it_imports_nothing_that_coverage_has_to_see() -> None:
    code = "import sys, sagellm_pytest; print([name for name in sys.modules if name.startswith('sagellm.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
