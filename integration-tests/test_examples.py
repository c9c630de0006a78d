"""Every script in examples/ runs and says something."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from suite import load_tests

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
LONG: set[str] = set()  # those that only `hatch run full` runs
TIMEOUT_S = 500


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


def test_kv_management_evicts_ended_requests_when_the_pool_is_small(capsys):
    example = load_tests("examples/kvmgr_end_to_end.py")
    report = example.main(total_blocks=3)
    assert report.match_lengths == {"first": 0, "second": 5, "third": 0}
    assert report.victims == ["first", "second"]
    assert "evicted first: blocks [0, 1]" in capsys.readouterr().out
    assert example.main().victims == []
    with pytest.raises(ValueError, match="2 blocks do not hold the longest request, which has 38 tokens"):
        example.main(total_blocks=2)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_is_listed_with_what_it_shows(script):
    assert f"({script.name})" in (ROOT / "examples" / "README.md").read_text()
