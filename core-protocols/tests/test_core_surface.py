"""The public surface of core: sorted, complete, and free of heavy imports."""

from __future__ import annotations

import importlib
import subprocess
import sys
import types

import pytest

import sagellm.core as core
from sagellm.core import lazy

HEAVY = (
    "torch",
    "numpy",
    "transformers",
    "msgspec",
    "pydantic",
    "typer",
    "rich",
    "pytest",
    "hypothesis",
    "xxhash",
)


def loaded_by(code: str) -> set[str]:
    """Run code in a new interpreter and return which heavy packages it loaded."""
    script = f"{code}\nimport sys\nprint(*[name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_core_loads_nothing_heavy() -> None:
    assert loaded_by("import sagellm.core") == set()


def test_importing_every_public_name_loads_nothing_heavy() -> None:
    assert loaded_by("import sagellm.core as c\nfor name in c.__all__: getattr(c, name)") == set()


def test_listing_plugins_loads_nothing_heavy() -> None:
    code = "from sagellm.core import PluginRegistry\nassert PluginRegistry.load().providers()"
    assert loaded_by(code) == set()


def test_importing_core_loads_none_of_its_modules() -> None:
    script = "import sagellm.core, sys\nprint(*[m for m in sys.modules if m.startswith('sagellm.core.')])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["sagellm.core._lazy", "sagellm.core._moved"]


def test_the_public_names_are_sorted_and_single() -> None:
    def by_kind(name: str) -> tuple[int, str]:  # constants, classes, the rest: ruff's order
        return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)

    assert core.__all__ in (sorted(core.__all__), sorted(core.__all__, key=by_kind))
    assert len(set(core.__all__)) == len(core.__all__)


@pytest.mark.parametrize("name", core.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    assert getattr(core, name) is getattr(core, name)


def test_every_public_class_and_function_says_what_it_is() -> None:
    things = [(name, getattr(core, name)) for name in core.__all__]
    silent = [
        name for name, thing in things if isinstance(thing, (type, types.FunctionType)) and not thing.__doc__
    ]
    assert silent == []


def test_an_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'sagellm.core' has no attribute 'Nothing'"):
        core.Nothing  # noqa: B018


def test_a_lazy_name_is_imported_once_and_then_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.ModuleType("lazy_package")
    monkeypatch.setitem(sys.modules, "lazy_package", package)
    package.__getattr__ = lazy("lazy_package", {"TokenIds": "sagellm.core.tokens"})  # type: ignore[method-assign]
    assert "TokenIds" not in vars(package)
    tokens = importlib.import_module("sagellm.core.tokens")
    assert package.TokenIds is tokens.TokenIds
    assert vars(package)["TokenIds"] is tokens.TokenIds
