"""The rooms of the house: what stands where, and on what. import-linter draws the arrows between them."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from suite import ROOT

MOST_IMPORTS = 20
WITHOUT_TORCH = """
import sys
for name in ("torch", "transformers", "tokenizers", "safetensors"):
    sys.modules[name] = None  # an import of it fails
from sagellm.engines.cli import main
main(sys.argv[1:])
"""
TRACE = str(ROOT / "benchmarks" / "traces" / "multi_turn.jsonl.xz")
COST = str(ROOT / "benchmarks" / "cost" / "h200-8b.json")


def sources() -> list[Path]:
    folders = [*ROOT.glob("*/src/sagellm"), *ROOT.glob("*/*/src/sagellm")]
    return sorted(path for folder in folders for path in folder.rglob("*.py") if path.name != "__init__.py")


def own_imports(path: Path) -> set[str]:
    """Return the modules of its own distribution that a file imports."""
    parts = path.parts[path.parts.index("sagellm", path.parts.index("src")) :]
    own = ".".join(parts[: 3 if parts[1] == "kvmgr" else 2]) + "."
    nodes = ast.walk(ast.parse(path.read_text()))
    named = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    return {module for module in named if module.startswith(own)}


def test_no_file_imports_more_than_20_others_of_its_own_distribution():
    counts = {str(path.relative_to(ROOT)): len(own_imports(path)) for path in sources()}
    assert {path: count for path, count in counts.items() if count > MOST_IMPORTS} == {}


@pytest.mark.parametrize(
    "arguments",
    [
        ("trace", "show", TRACE),
        ("simulate", TRACE, "--cache-only", "--capacity", "300", "--limit", "60"),
        ("simulate", TRACE, "--cost", COST, "--limit", "20"),
    ],
    ids=["trace", "replay", "simulation"],
)
def test_the_lab_replays_and_simulates_without_torch(arguments, tmp_path):
    command = [sys.executable, "-c", WITHOUT_TORCH, "llm", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()
