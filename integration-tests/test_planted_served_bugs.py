"""The simulation of the served system can fail: it finds each planted bug, as the documentation says."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from planted_served_bugs import BUGS, all_bugs, run_with
from suite import ROOT

_ROW = re.compile(r"^\| `(.+?)` \| (.+) \| (\w+) \| (\d+) \|$", re.MULTILINE)


def test_the_bugs_are_documented_and_at_least_three_are_in_the_front():
    text = (ROOT / "docs" / "reliability.md").read_text().partition("## Simulation of the served system")[2]
    documented = [row[:3] for row in _ROW.findall(text)]
    assert documented == [(bug.name, bug.breaks, bug.part) for bug in all_bugs()]
    assert len({name for name, _, _ in documented}) == len(documented) >= 20
    assert sum(bug.part == "front" for bug in BUGS) >= 3


def test_a_bug_in_the_front_is_found_by_some_of_the_first_seeds():
    (bug,) = [each for each in BUGS if each.name == "a-seat-kept-after-a-disconnect"]
    found = run_with(bug.plant, max_seeds=10)
    assert found.kind == "leak"
    assert "seats" in found.message


@pytest.mark.full  # two minutes of CPU
@pytest.mark.timeout(1200)
def test_each_planted_bug_is_found_and_nothing_without_one():
    program = [sys.executable, str(ROOT / "integration-tests" / "planted_served_bugs.py")]
    done = subprocess.run(program, capture_output=True, text=True, timeout=1000)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1 + len(all_bugs())
