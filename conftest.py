"""For the whole suite: tests that measure time run alone, and the end says what was skipped and why."""

from __future__ import annotations

import fcntl
import gc
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from sagellm.core.conformance.aspects import aspect_of

# No machine is too slow for an example, nor for making one.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

_KIT = "sagellm.core.testing"
_REPEATING = ("cost", "integrity", "random operations", "threads")
_TURN = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    """Let the workers of one run share a lock file, and keep measurements out of the user's cache."""
    os.environ.setdefault("SAGELLM_RATES_FILE", "off")
    worker: dict[str, Any] = getattr(config, "workerinput", {})
    if worker:
        config.stash[_TURN] = Path(worker["turn"])
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # so that workers do not take each other's cores


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Start one worker more than there are CPUs: many tests wait for a process."""
    return len(os.sched_getaffinity(0)) + 1


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker of pytest-xdist where the lock file is."""
    factory: pytest.TempPathFactory = node.config._tmp_path_factory
    node.workerinput["turn"] = str(factory.getbasetemp() / "turn")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put those that measure time last, together, and trace what repeats its lines only once.

    That is the kit's heavy tests for one provider, and of a test that is marked `repeats` the first case.
    """
    is_traced = config.pluginmanager.hasplugin("_cov")
    seen = set()
    for item in items:
        aspect = _aspect_of(item)
        if aspect == "cost":
            item.add_marker("alone")
        is_marked = item.get_closest_marker("repeats") is not None
        name = (item.nodeid if is_marked else item.name).partition("[")[0]
        if is_traced and (is_marked or aspect in _REPEATING) and name in seen:  # it would take twice as long
            item.add_marker(pytest.mark.no_cover)
        seen.add(name)
    items.sort(key=_is_alone)


def _aspect_of(item: pytest.Item) -> str | None:
    """Return the part of a contract that a test of the conformance kit is, None for any other test."""
    function = getattr(item, "function", None)
    return aspect_of(item.name) if getattr(function, "__module__", "").startswith(_KIT) else None


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


@pytest.fixture(autouse=True, scope="module")
def _what_stays_is_not_searched_again() -> None:
    """Keep the collector off imported libraries; with torch and transformers a full search takes 0.4 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _late_steps() -> None:
    """With SAGELLM_LATE_STEPS set, have every engine keep a step in flight while it plans the next one."""
    if "SAGELLM_LATE_STEPS" in os.environ:
        from step_executors import LateExecutor

        from sagellm.engines.worker import inline_executor

        inline_executor.InlineExecutor = LateExecutor  # type: ignore


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many tests were skipped for which reason."""
    reasons = Counter(str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", []))
    for reason, number in reasons.most_common():
        terminalreporter.write_line(f"skipped {number}: {reason.removeprefix('Skipped: ')}")
