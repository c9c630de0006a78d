"""For the whole suite: how many workers it has, what they keep, and at the end what was skipped and why."""

from __future__ import annotations

import gc
import os
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# No machine is too slow for an example, nor for making one.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_configure(config: pytest.Config) -> None:
    """Keep workers from taking each other's cores, and measurements out of the user's cache."""
    os.environ.setdefault("SAGELLM_RATES_FILE", "off")
    if hasattr(config, "workerinput"):
        os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Start one worker more than there are CPUs: many tests wait for a process."""
    return len(os.sched_getaffinity(0)) + 1


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
