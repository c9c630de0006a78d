"""A package imports what its metadata declares, and what only an extra brings behind a guard."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.metadata import packages_distributions
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
HATCH = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["envs"]["default"]
PACKAGES = [each if isinstance(each, str) else each["path"] for each in HATCH["workspace"]["members"]]

GUARDS = {
    "kv-pool": {"sagellm.kvmgr.kv_pool.tiers.backends": "HBMBackend"},
    "lifetime-predictor": {"sagellm.kvmgr.lifetime.learnt": "except ImportError: it asks for the extra"},
    "accel": {"sagellm.accel.cuda.backend": "check_machine"},
    "engines": {
        "sagellm.engines.grammar.binding": "the provider, before anything is compiled",
        "sagellm.engines.sampling.draws": "except ImportError: it draws with torch alone",
    },
    "engines/server": {"sagellm.server.http.spans": "check_spans"},
    "engines/lab": {"sagellm.lab.plots": "check_plot, before the work that is drawn"},
}
"""The modules whose functions import what an extra brings, and what tells a user who lacks it."""

ARRAYS = {"core-protocols": {"numpy"}}
"""Imported by functions that are given arrays, or schedule; the packages that call them declare it."""

BROUGHT_BY = packages_distributions()


class Import(NamedTuple):
    """What is imported with a module, or (lazily) when one of its functions is called."""

    target: str
    is_lazy: bool


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@cache
def declared(package: str) -> tuple[set[str], set[str]]:
    """Return the distributions that a package depends on, and those that only its extras bring."""
    project = tomllib.loads((ROOT / package / "pyproject.toml").read_text())["project"]
    extras = [each for extra in project.get("optional-dependencies", {}).values() for each in extra]
    needed, optional = (
        {normal(re.split(r"[^\w.-]", each)[0]) for each in part} for part in (project["dependencies"], extras)
    )
    return needed | {project["name"]}, optional - needed - ARRAYS.get(package, set())


@cache
def modules() -> dict[str, tuple[str, ast.Module]]:
    """Return every module of the packages: its package and its source."""
    found = {}
    for package in PACKAGES:
        source = ROOT / package / "src"
        for path in source.rglob("*.py"):
            parts = path.relative_to(source).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = package, ast.parse(path.read_text())
    return found


def of_package(package: str) -> list[str]:
    return [name for name, (owner, _) in modules().items() if owner == package]


@cache
def imports_of(module: str) -> list[Import]:
    return list(imports_in(modules()[module][1], is_lazy=False))


def imports_in(node: ast.AST, *, is_lazy: bool) -> Iterator[Import]:
    for each in ast.iter_child_nodes(node):
        match each:
            case ast.If(test=ast.Name("TYPE_CHECKING")):
                continue
            case ast.Import():
                yield from (Import(alias.name, is_lazy) for alias in each.names)
            case ast.ImportFrom(module=str(module), level=0):
                yield Import(module, is_lazy)
                yield from (Import(defining(module, alias.name), is_lazy) for alias in each.names)
            case ast.Call(func=ast.Name("import_module"), args=[ast.Constant(str(name))]):
                yield Import(name, is_lazy)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                yield from imports_in(each, is_lazy=True)
                continue
        yield from imports_in(each, is_lazy=is_lazy)


def defining(module: str, name: str) -> str:
    """Return which module `from module import name` is about."""
    return f"{module}.{name}" if f"{module}.{name}" in modules() else given_by(module).get(name, module)


@cache
def given_by(package: str) -> dict[str, str]:
    """Return the names that a package gives lazily, as type checkers see them, and where they are from."""
    if package not in modules():
        return {}
    guarded = (node for node in modules()[package][1].body if isinstance(node, ast.If))
    nodes = [node for block in guarded for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in nodes for alias in node.names}


def distributions_of(target: str) -> set[str]:
    """Return which distributions an import may come from; none for the standard library."""
    if target in modules():
        return {f"sagellm-{modules()[target][0].rpartition('/')[2]}"}
    root = target.partition(".")[0]
    return set() if root in sys.stdlib_module_names else set(map(normal, BROUGHT_BY.get(root, [root])))


def needs_extra(target: str, package: str, others: set[str]) -> bool:
    """Say whether what a package imports needs an extra; `others` are modules known to need one."""
    if target in modules():
        return any(each in others for each in accumulate(target.split("."), "{}.{}".format))  # parents too
    needed, optional = declared(package)
    found = distributions_of(target)
    return bool(found & optional) and not found & needed


@cache
def in_need() -> set[str]:
    """Return all modules that cannot be imported without an extra."""
    found: set[str] = set()
    while more := {
        name
        for name, (package, _) in modules().items()
        if name not in found
        and (
            needs_extra(name, package, found)
            or any(not is_lazy and needs_extra(each, package, found) for each, is_lazy in imports_of(name))
        )
    }:
        found |= more
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_declares_all_that_it_imports(package):
    known = set().union(*declared(package))
    for module in of_package(package):
        for target, is_lazy in imports_of(module):
            found = distributions_of(target)
            allowed = known | ARRAYS.get(package, set()) if is_lazy else known
            assert not found or found & allowed, f"{module} imports {target}, undeclared by {package}"


@pytest.mark.parametrize("package", PACKAGES)
def test_what_only_an_extra_brings_is_imported_behind_a_guard(package):
    entered = {
        module
        for module in set(of_package(package)) - in_need()
        if any(is_lazy and needs_extra(each, package, in_need()) for each, is_lazy in imports_of(module))
    }
    assert entered == set(GUARDS.get(package, {}))


@pytest.mark.parametrize("package", PACKAGES)
def test_no_provider_needs_an_extra_to_be_imported(package):
    (plugin,) = (name for name in of_package(package) if name.endswith(".plugin"))
    named = import_module(plugin)
    hooks = (getattr(named, hook, list) for hook in ("sagellm_providers", "sagellm_commands"))
    targets = {each.target.partition(":")[0] for hook in hooks for each in hook()}
    assert targets
    assert targets <= set(modules())
    assert not targets & in_need()
