"""Modules that moved are found under their old names until the next release, as they are, and warn."""

from __future__ import annotations

import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path

import pytest
from suite import ROOT

from sagellm import core
from sagellm.core._moved import _MOVED, _MOVED_NAMES


def source_of(module: str) -> Path:
    (found,) = {
        path
        for pattern in ("*/src", "*/*/src")
        for src in ROOT.glob(pattern)
        for path in (src / f"{module.replace('.', '/')}.py", src / module.replace(".", "/") / "__init__.py")
        if path.exists()
    }
    return found


def modules_of(new: str) -> list[str]:
    """Return a module and, of a package, all below it that can be imported."""
    source = source_of(new)
    if source.name != "__init__.py":
        return [new]
    parts = [path.relative_to(source.parent).with_suffix("").parts for path in source.parent.rglob("*.py")]
    names = {".".join((new, *(each for each in part if each != "__init__"))) for part in parts}
    return sorted(name for name in names if not name.endswith(("__main__", "plugin")))


def test_every_module_that_moved_is_the_same_under_its_old_name():
    pairs = [
        (module.replace(new, old, 1), module)
        for old, new in sorted(_MOVED.items())
        for module in modules_of(new)
    ]
    assert len(pairs) > 150
    code = f"""
import sys, warnings
from importlib import import_module
for old, new in {pairs!r}:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        old_module = import_module(old)
    assert old_module is import_module(new), old
    assert old_module.__name__ == old_module.__spec__.name == new, (old, old_module.__spec__)
    told = [str(each.message) for each in found if each.category is DeprecationWarning]
    assert any(f"{{new}} now" in each for each in told), (old, told)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", _MOVED_NAMES)
def test_a_name_that_core_itself_had_is_found_and_warns(module):
    for name in _MOVED_NAMES[module].split():
        with pytest.warns(
            DeprecationWarning, match=rf"sagellm\.core\.{name} is {module}\.{name} now"
        ) as told:
            found = getattr(core, name)
        assert found is getattr(import_module(module), name)
        assert told[0].filename == __file__
    assert not set(_MOVED_NAMES[module].split()) & set(core.__all__)


def test_the_warning_points_at_the_import(tmp_path):
    (tmp_path / "mine.py").write_text("\n\nfrom sagellm.engines.outputs import RequestOutput\n")
    done = subprocess.run(
        [sys.executable, "-W", "default", "mine.py"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    (line,) = (line for line in done.stderr.splitlines() if "DeprecationWarning" in line)
    assert line.startswith(f"{tmp_path / 'mine.py'}:3: ") or line.startswith("mine.py:3: ")


@pytest.mark.filterwarnings("ignore:.* now; :DeprecationWarning")
def test_threads_that_import_old_names_at_once_get_the_modules():
    failures = []

    def load(old: str, new: str) -> None:
        try:
            assert import_module(old) is import_module(new)
        except BaseException as error:
            failures.append((old, error))

    pairs = [
        (f"sagellm.engines.http.{name}", f"sagellm.server.http.{name}") for name in ("app", "body", "errors")
    ]
    threads = [threading.Thread(target=load, args=pair) for pair in pairs * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_what_never_was_is_not_found():
    with pytest.raises(
        ModuleNotFoundError, match=r"sagellm\.engines\.http\.moon is sagellm\.server\.http\.moon"
    ):
        import_module("sagellm.engines.http.moon")
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'sagellm\.engines\.moon'"):
        import_module("sagellm.engines.moon")


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("sagellm.core.chaos", "sagellm.server.chaos", "child_environment flaky_selector in_pieces notice"),
        ("sagellm.core.logging", "sagellm.engines.logging", "JSONFormatter LEVELS configure fields is_json"),
        ("sagellm.core.request", "sagellm.engines.engine_core.sequence", "RequestStatus"),
    ],
)
def test_names_that_left_a_module_of_core_are_found_with_a_warning(old, new, names):
    for name in names.split():
        with pytest.warns(DeprecationWarning, match=f"{name} is {new}.{name} now"):
            assert getattr(import_module(old), name)
