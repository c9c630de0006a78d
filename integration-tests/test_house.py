"""The rooms of the house: what stands where, and on what. import-linter draws the arrows between them."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from suite import ROOT

from sagellm import core

MOST_IMPORTS = 20
MOST_CORE_NAMES = 180
MOST_HANDLERS_OF_CTRL_C = 6
CORE = ROOT / "core-protocols" / "src" / "sagellm" / "core"
OF_CORE_ITSELF = {
    "chaos_sockets": "chaos imports it when it is on",
    "number_ranges": "decisions print their rows with it",
    "random_access": "what Files open",
    "late_kv_tier": "the simulation and the tests of two distributions make tiers late with it",
    "plugin": "the entry point",
    "version": "the version of the protocols, which plugins state",
}
WITHOUT_TORCH = """
import sys
for name in ("torch", "transformers", "tokenizers", "safetensors"):
    sys.modules[name] = None  # an import of it fails
from sagellm.engines.cli import main
main(sys.argv[1:])
"""
TRACE = str(ROOT / "benchmarks" / "traces" / "multi_turn.jsonl.xz")
COST = str(ROOT / "benchmarks" / "cost" / "h200-8b.json")


def sources(*, with_packages: bool = False) -> list[Path]:
    folders = [*ROOT.glob("*/src/sagellm"), *ROOT.glob("*/*/src/sagellm")]
    paths = sorted(path for folder in folders for path in folder.rglob("*.py"))
    return [path for path in paths if with_packages or path.name != "__init__.py"]


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


def test_core_has_few_public_names():
    assert len(core.__all__) <= MOST_CORE_NAMES


def handlers_of_ctrl_c(text: str) -> int:
    """Count the places where code deals with KeyboardInterrupt: handlers, `suppress`, checks of a class."""
    num_handlers = 0
    for node in ast.walk(ast.parse(text)):
        kinds: list[ast.expr | None] = []
        if isinstance(node, ast.ExceptHandler):
            kinds = [node.type]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            kinds = [*node.args[1:]]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
            kinds = [*node.args]
        named = (name for kind in kinds if kind is not None for name in ast.walk(kind))
        num_handlers += any(isinstance(name, ast.Name) and name.id == "KeyboardInterrupt" for name in named)
    return num_handlers


def test_ctrl_c_is_dealt_with_in_few_places():
    counts = {str(path.relative_to(ROOT)): handlers_of_ctrl_c(path.read_text()) for path in sources()}
    found = {path: count for path, count in counts.items() if count}
    assert "core-protocols/src/sagellm/core/plugins/failure.py" in found
    assert sum(found.values()) <= MOST_HANDLERS_OF_CTRL_C, found


@pytest.mark.parametrize(
    "handler",
    [
        "try:\n    call()\nexcept KeyboardInterrupt:\n    raise",
        "try:\n    call()\nexcept (ValueError, KeyboardInterrupt) as error:\n    raise",
        "with suppress(OSError, KeyboardInterrupt):\n    call()",
        "if isinstance(error, KeyboardInterrupt | OSError):\n    raise error",
    ],
)
def test_a_handler_of_ctrl_c_is_counted(handler):
    assert handlers_of_ctrl_c(handler) == 1
    assert handlers_of_ctrl_c(handler.replace("KeyboardInterrupt", "KeyError")) == 0


def test_a_module_of_core_serves_two_distributions_or_is_a_contract():
    users: dict[str, set[str]] = {}
    for path in sources(with_packages=True):
        distribution = str(path).partition("/src/")[0]
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("sagellm.core"):
                continue
            named = node.module.removeprefix("sagellm.core").removeprefix(".")
            homes = [named] if named else [core._MODULE_OF.get(each.name, ".")[1:] for each in node.names]
            for home in homes:
                users.setdefault(home, set()).add(distribution)
    modules = {".".join(path.relative_to(CORE).with_suffix("").parts) for path in CORE.rglob("*.py")}
    lonely = {
        module: sorted(users.get(module, set()) - {str(CORE.parents[2])})
        for module in modules
        if not module.startswith(("protocols.", "plugins.", "_")) and not module.endswith("__init__")
        if module not in OF_CORE_ITSELF
    }
    assert {module: found for module, found in lonely.items() if len(found) < 2} == {}


@pytest.mark.parametrize(
    "arguments",
    [
        ("trace", "show", TRACE),
        ("simulate", TRACE, "--cache-only", "--capacity", "300", "--limit", "60"),
        ("simulate", TRACE, "--cost", COST, "--limit", "20"),
        ("ab", TRACE, "--cost", COST, "--limit", "40", "--b", "order=none", "--html", "report.html"),
    ],
    ids=["trace", "replay", "simulation", "comparison"],
)
def test_the_lab_replays_and_simulates_without_torch(arguments, tmp_path):
    command = [sys.executable, "-c", WITHOUT_TORCH, "llm", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()
