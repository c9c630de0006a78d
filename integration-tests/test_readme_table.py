"""The README's figures are those of the results that are kept."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def readme_table():
    path = ROOT / "benchmarks" / "readme_table.py"
    spec = importlib.util.spec_from_file_location("readme_table", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_the_readme_shows_what_is_kept(readme_table):
    text = (ROOT / "README.md").read_text()
    shown = text[text.index(readme_table.BEGIN) + len(readme_table.BEGIN) : text.index(readme_table.END)]
    assert shown == f"\n{readme_table.table()}\n", "run python benchmarks/readme_table.py"


def test_a_result_that_changes_changes_the_table(readme_table, tmp_path):
    for row in readme_table.ROWS:
        (tmp_path / f"{row.result}.json").write_bytes(
            (readme_table.RESULTS / f"{row.result}.json").read_bytes()
        )
    memory = tmp_path / "memory-zen4-2core.json"
    memory.write_text(json.dumps({**json.loads(memory.read_text()), "overhead_mib": 7.0}))
    assert "| 7 MiB |" in readme_table.table(tmp_path)


def test_a_row_that_a_peer_wins_is_in_the_table(readme_table):
    assert "vLLM" in next(
        line for line in readme_table.table().splitlines() if "eviction of 512 blocks" in line
    )
