"""Every script in examples/ runs and says something."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
LONG: set[str] = set()  # those that only `hatch run full` runs
TIMEOUT_S = 300


def parameters() -> list[pytest.param]:
    return [
        pytest.param(script, id=script.stem, marks=[pytest.mark.full] if script.name in LONG else [])
        for script in SCRIPTS
    ]


@pytest.mark.parametrize("script", parameters())
def test_a_script_runs_and_says_something(script, tmp_path):
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_is_listed_with_what_it_shows(script):
    assert f"({script.name})" in (ROOT / "examples" / "README.md").read_text()
