"""The checks of this suite can fail: each planted bug is found by the test that the documentation names."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from planted_bugs import BUGS
from suite import ROOT

_ROW = re.compile(r"^\| `(.+?)` \| (.+) \| `(.+?)` \|$", re.MULTILINE)


def test_at_least_twenty_bugs_are_documented_with_the_test_that_finds_each():
    documented = _ROW.findall((ROOT / "docs" / "reliability.md").read_text().partition("## Planted bugs")[2])
    assert documented == [(bug.name, bug.breaks, bug.caught_by) for bug in BUGS]
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 20


@pytest.mark.full  # a minute of CPU
def test_each_planted_bug_is_found_and_without_one_all_tests_pass():
    program = [sys.executable, str(ROOT / "integration-tests" / "planted_bugs.py")]
    done = subprocess.run(program, capture_output=True, text=True, timeout=500)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1 + len(BUGS)
