"""docs/hooks.md says what the code says, word for word."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

from sagellm.core import KINDS, PluginRegistry
from sagellm.core.plugins import hookspecs

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "hooks.md").read_text()
SIGNATURES = re.findall(r"^```python signature\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
KIND_ROWS = {
    kind: (protocol, factory)
    for kind, protocol, factory in re.findall(r"^\| `(\w+)` \| `(\w+)` \| `([^`]+)` \|", TEXT, re.MULTILINE)
}
NULL_ROWS = re.findall(r"^\| `(\w+)` \| `(Null\w+)` \|", TEXT, re.MULTILINE)


def signature_of(node: ast.FunctionDef) -> str:
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"def {node.name}({ast.unparse(node.args)}){returns}"


def functions(source: str) -> dict[str, ast.FunctionDef]:
    found = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    return {node.name: node for node in found}


def hooks() -> dict[str, ast.FunctionDef]:
    return functions(Path(hookspecs.__file__).read_text())


def documented_hooks() -> dict[str, ast.FunctionDef]:
    return {name: node for block in SIGNATURES for name, node in functions(block).items()}


def protocol_of(kind: str) -> type:
    name, _ = KIND_ROWS[kind]
    return getattr(import_module("sagellm.core"), name)


def test_every_hook_is_documented_and_no_other():
    assert set(documented_hooks()) == set(hooks())


@pytest.mark.parametrize("name", sorted(hooks()))
def test_a_documented_hook_has_the_signature_of_the_code(name):
    assert signature_of(documented_hooks()[name]) == signature_of(hooks()[name])


@pytest.mark.parametrize("name", sorted(hooks()))
def test_a_documented_hook_says_when_it_runs_in_the_words_of_the_code(name):
    assert ast.get_docstring(hooks()[name]) in TEXT


def test_every_kind_of_provider_is_documented_and_no_other():
    assert set(KIND_ROWS) == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_documented_factory_is_the_one_that_the_protocol_states(kind):
    contract = " ".join((protocol_of(kind).__doc__ or "").split())
    stated = re.search(r"Providers are called as `(factory\([^`]*\))`", contract)
    assert stated, f"{protocol_of(kind).__name__} does not say how its providers are called"
    assert KIND_ROWS[kind][1] == stated.group(1) == KINDS[kind].call


@pytest.mark.parametrize("kind", KINDS)
def test_every_protocol_ships_a_null_implementation(kind):
    protocol = protocol_of(kind)
    nulls = [
        value
        for name, value in vars(import_module(protocol.__module__)).items()
        if name.startswith("Null") and isinstance(value, type) and issubclass(value, protocol)
    ]
    assert len(nulls) == 1
    assert not getattr(nulls[0], "__abstractmethods__", None)


def test_every_kind_can_be_switched_off_by_the_name_null():
    found = {
        entry.provider.kind for entry in PluginRegistry.load().providers() if entry.provider.name == "null"
    }
    assert found == set(KINDS)


def test_every_provider_resolves_to_an_implementation_of_its_protocol():
    registry = PluginRegistry.load()
    registry.require_healthy()
    for entry in registry.providers():
        if entry.distribution.startswith("sagellm-"):
            target = registry.resolve(entry.provider.kind, entry.qualified_name)
            assert callable(target), entry.qualified_name
            if isinstance(target, type):
                assert issubclass(target, protocol_of(entry.provider.kind)), entry.qualified_name


def test_every_provider_has_a_summary_of_a_few_words():
    for entry in PluginRegistry.load().providers():
        assert 0 < len(entry.provider.summary) <= 80, entry.qualified_name
