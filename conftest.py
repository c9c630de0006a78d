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

from sagellm.core.conformance.aspects import aspect_of

_REPEATING = ("cost", "random operations", "threads")
_TURN = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    """Let the workers of one run share a lock file."""
    worker: dict[str, Any] = getattr(config, "workerinput", {})
    if worker:
        config.stash[_TURN] = Path(worker["turn"])
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # so that workers do not take each other's cores


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker of pytest-xdist where the lock file is."""
    factory: pytest.TempPathFactory = node.config._tmp_path_factory
    node.workerinput["turn"] = str(factory.getbasetemp() / "turn")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Trace each test that runs its lines ten thousand times with one provider: it takes three times as long."""
    if config.pluginmanager.hasplugin("_cov"):
        traced = set()
        for item in items:
            if aspect_of(item.name) in _REPEATING and item.name in traced:
                item.add_marker(pytest.mark.no_cover)
            traced.add(item.name)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Run a test that measures time while no other worker runs one."""
    turn = item.config.stash.get(_TURN, None)
    if turn is None:
        return (yield)
    is_alone = item.get_closest_marker("alone") is not None or aspect_of(item.name) == "cost"
    with _taking_turns(turn, is_alone=is_alone):
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


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many tests were skipped for which reason."""
    reasons = Counter(str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", []))
    for reason, number in reasons.most_common():
        terminalreporter.write_line(f"skipped {number}: {reason.removeprefix('Skipped: ')}")
