"""The pytest plugin of sageLLM's tests: what their marks mean, and which of them run only if asked for.

pytest loads it wherever sagellm-testing is installed; `-p no:sagellm_pytest` turns it off. It is not a
part of the package `sagellm`, whose lines coverage must see from the first import on. It registers the marks,
and beyond that it touches two kinds of tests only: those that a class of the conformance kit
(`sagellm.testing`) brings, and those whose nearest pyproject.toml names marks to deselect:

    [tool.sagellm.pytest]
    deselect = ["full", "matrix", "cuda"]

Of these, tests with such a mark (of the kit, `full`) run only if `-m` is given, which then decides alone.
"""

from __future__ import annotations

import fcntl
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

MARKS = {
    "alone": "measures time, so no other test runs beside it",
    "full": "a longer case, run with -m full",
    "matrix": "the full product of all settings, run by hand",
    "no_cover": "repeats lines of other tests for so long that coverage does not trace it",
    "cuda": "needs a CUDA device",
}
_KIT = "sagellm.testing"
_LONG_OF_THE_KIT = frozenset({"full"})
_REPEATING = ("cost", "integrity", "random operations", "threads")
_TURN = pytest.StashKey[Path]()


# So that a failing `assert` of the kit shows its values, as in a test file.
pytest.register_assert_rewrite(_KIT)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that makes a short run of a long suite."""
    parser.addoption(
        "--first-cases",
        action="store_true",
        help="run one case of each parametrized test, and the kit's heavy tests for one provider",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks, and stop the first of the two tracers that pytest-cov starts in a worker.

    To leave a test untraced pytest-cov stops the second one only, whereupon the first one would go on.
    """
    for name, meaning in MARKS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    coverage: Any = config.pluginmanager.getplugin("_cov")
    if hasattr(config, "workerinput") and coverage is not None:
        coverage.cov_controller.pause()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect long tests, put those that measure time last, and trace the first case of a test alone.

    Those that measure time are also the kit's tests of cost. Its heavy tests are traced for one provider.
    """
    ours = {item: marks for item in items if (marks := _deselected_by_default(item)) is not None}
    if not config.option.markexpr:
        _drop({item for item, marks in ours.items() if _has_any(item, marks)}, items, config)
    later = _later_cases([item for item in items if item in ours])
    if config.option.first_cases:
        _drop(set(later), items, config)
    for item in ours:
        if _aspect_of(item) == "cost":
            item.add_marker("alone")
    if config.pluginmanager.hasplugin("_cov"):  # it would take twice as long
        for item in later:
            item.add_marker(pytest.mark.no_cover)
    alone = {item for item in ours if _is_alone(item)}
    items.sort(key=alone.__contains__)
    if alone and hasattr(config, "workerinput"):  # workers of pytest-xdist share the folder above theirs
        factory: pytest.TempPathFactory = config._tmp_path_factory  # type: ignore[attr-defined]
        config.stash[_TURN] = factory.getbasetemp().parent / "turn"


def _deselected_by_default(item: pytest.Item) -> frozenset[str] | None:
    """Return the marks that keep a test from running unless asked for; None if it is not one of ours."""
    return _LONG_OF_THE_KIT if _is_of_the_kit(item) else _marks_named_for(item.path.parent)


def _is_of_the_kit(item: pytest.Item) -> bool:
    return str(getattr(getattr(item, "function", None), "__module__", "")).startswith(_KIT)


@cache
def _marks_named_for(folder: Path) -> frozenset[str] | None:
    """Return what the nearest pyproject.toml, here or above, deselects; None if it does not say."""
    file = folder / "pyproject.toml"
    if not file.is_file():
        return None if folder == folder.parent else _marks_named_for(folder.parent)
    try:
        table = tomllib.loads(file.read_text("utf-8"))
        marks = table["tool"]["sagellm"]["pytest"]["deselect"]
    except (OSError, ValueError, KeyError, TypeError):  # the tools that need the file say what is wrong
        return None
    if not isinstance(marks, list) or not all(mark in MARKS for mark in marks):
        raise pytest.UsageError(
            f"{file}: tool.sagellm.pytest.deselect is {marks!r}; it must be a list of {', '.join(MARKS)}"
        )
    return frozenset(marks)


def _drop(dropped: set[pytest.Item], items: list[pytest.Item], config: pytest.Config) -> None:
    if dropped:
        config.hook.pytest_deselected(items=[item for item in items if item in dropped])
        items[:] = [item for item in items if item not in dropped]


def _later_cases(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return all but the first case of each test; of the kit's heavy tests, all but those of one provider."""
    seen, later = set(), []
    for item in items:
        name = (item.name if _aspect_of(item) in _REPEATING else item.nodeid).partition("[")[0]
        if name in seen:
            later.append(item)
        seen.add(name)
    return later


def _aspect_of(item: pytest.Item) -> str | None:
    """Return the part of a contract that a test of the conformance kit is, None for any other test."""
    if not _is_of_the_kit(item):
        return None
    from sagellm.testing.conformance.aspects import aspect_of  # by now the kit is imported

    return aspect_of(item.name)


def _has_any(item: pytest.Item, marks: frozenset[str]) -> bool:
    return any(mark.name in marks for mark in item.iter_markers())


def _is_alone(item: pytest.Item) -> bool:
    return item.get_closest_marker("alone") is not None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Run a test that measures time while no other worker runs one."""
    turn = item.config.stash.get(_TURN, None)
    if turn is None:
        return (yield)
    with _taking_turns(turn, is_alone=_is_alone(item)):
        return (yield)


@contextmanager
def _taking_turns(turn: Path, *, is_alone: bool) -> Iterator[None]:
    # All pass the gate one by one, and one that waits to be alone keeps it shut, so that none overtakes it.
    with turn.with_suffix(".gate").open("w") as gate, turn.with_suffix(".room").open("w") as room:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield
