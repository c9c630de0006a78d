"""Runs a plugin's code, which may hang or crash, under the kit, in a process of its own.

`python -m sagellm.testing.conformance.worker`, with a task as JSON on standard input. Each line of standard
output is an event; the plugin's own output is discarded.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sagellm.core.plugins.registry import PluginRegistry
from sagellm.testing.conformance.aspects import ASPECTS, aspect_of, rule_of
from sagellm.testing.conformance.explain import cause_of, explain
from sagellm.testing.conformance.process import STACKS_SIGNAL
from sagellm.testing.conformance.report import Fault

Emit = Callable[[Mapping[str, Any]], None]

_TESTS = "test_plugin.py"
# Plugins of pytest are not loaded here, ours neither.
_SOURCE = """
import pytest

pytest.register_assert_rewrite("sagellm.testing")

from sagellm.testing.conformance.worker import CallsBefore
from sagellm.testing.installed import installed_contract

TestProvider = installed_contract(
    {kind!r}, {name!r}, {options!r}, sample={sample!r}, on_call=CallsBefore({events!r})
)
"""


def main() -> None:
    """Do the task that standard input describes."""
    stacks = os.fdopen(os.dup(sys.stderr.fileno()), "w", encoding="utf-8")  # pytest takes standard error
    faulthandler.register(STACKS_SIGNAL, stacks, all_threads=True)
    task = json.load(sys.stdin)
    events = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def emit(event: Mapping[str, Any]) -> None:
        events.write(json.dumps(event) + "\n")
        events.flush()

    if task["name"] is None:
        _list_providers(task["distribution"], emit)
    else:
        _run_tests(task, events.fileno(), emit)
    emit({"event": "done"})
    events.close()
    os._exit(0)  # whatever threads the plugin has left


def _list_providers(distribution: str, emit: Emit) -> None:
    registry = PluginRegistry.load()
    emit(
        {
            "event": "providers",
            "providers": [
                [entry.provider.kind, entry.provider.name]
                for entry in registry.providers()
                if entry.distribution == distribution
            ],
            "error": next((str(p.error) for p in registry.plugins if p.error is not None), None),
        }
    )


def _run_tests(task: Mapping[str, Any], events: int, emit: Emit) -> None:
    import pytest

    qualified_name = f"{task['distribution']}:{task['name']}"
    given = {name: task[name] for name in ("kind", "options", "sample")}
    source = _SOURCE.format(name=qualified_name, events=events, **given)
    Path(_TESTS).write_text(source, encoding="utf-8")
    options = ["-m", "not full", "-p", "no:cacheprovider", "--noconftest", "-c", os.devnull, "--rootdir", "."]
    pytest.main([_TESTS, *options], plugins=[_Reporter(task["finished"], emit)])


class CallsBefore:
    """Emits each call of a method before the first test, which the module of the tests cannot do itself."""

    def __init__(self, events: int) -> None:
        self._events = events  # a file descriptor

    def __call__(self, method: str) -> None:
        """Emit which method is about to run."""
        os.write(self._events, f"{json.dumps({'event': 'call', 'method': method})}\n".encode())


class _Reporter:
    """A pytest plugin that emits events."""

    def __init__(self, finished: list[str], emit: Emit) -> None:
        self._finished, self._emit = finished, emit

    def pytest_exception_interact(self, call: Any, report: Any) -> None:
        """Emit why the provider could not be made."""
        import pytest

        if getattr(report, "when", "") == "collect":
            error = call.excinfo.value
            if isinstance(error, pytest.Collector.CollectError):
                error = error.__cause__ or error
            self._emit({"event": "error", "type": type(error).__name__, "text": str(error)})

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Leave out what an earlier process finished; put tests first that others could disturb."""
        items[:] = [item for item in items if item.nodeid not in self._finished]
        items.sort(key=lambda item: _turn(_name(item)))

    def pytest_collection_finish(self, session: Any) -> None:
        """Emit which tests will run."""
        tests = [[item.nodeid, rule_of(_name(item)), aspect_of(_name(item))] for item in session.items]
        methods = next((list(item.cls.methods) for item in session.items), [])
        self._emit({"event": "plan", "tests": tests, "methods": methods})

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Emit which test begins."""
        self._emit({"event": "start", "test": nodeid})

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        """Emit how it ended. Returns nothing, so pytest makes its own report as well."""
        import pytest

        if call.when != "call" and call.excinfo is None:
            return
        exercised = getattr(item.instance, "exercised", None)
        num_calls = {} if exercised is None else exercised.num_calls
        ended = {"event": "end", "test": item.nodeid, "outcome": "passed", "num_calls": num_calls}
        if call.excinfo is not None and isinstance(call.excinfo.value, pytest.skip.Exception):
            ended |= {"outcome": "skipped", "reason": str(call.excinfo.value)}
        elif call.excinfo is not None:
            ended |= {"outcome": "failed", "fault": asdict(self._fault(item, call.excinfo))}
        self._emit(ended)

    def _fault(self, item: Any, excinfo: Any) -> Fault:
        expected, found = explain(excinfo.value, excinfo.tb)
        calls = getattr(item.instance, "calls", None)
        case = getattr(item, "callspec", None)
        return Fault(
            rule=rule_of(_name(item)),
            meaning=next(iter((item.obj.__doc__ or "").strip().splitlines()), ""),
            found=found,
            expected=expected,
            cases=() if case is None else (case.id,),
            calls=() if calls is None else tuple(calls.texts()),
            num_calls=0 if calls is None else calls.num_calls,
            cause=cause_of(excinfo.value, excinfo.tb),
        )


def _turn(test_name: str) -> tuple[int, bool]:
    return ASPECTS.index(aspect_of(test_name)), "share_nothing" not in test_name


def _name(item: Any) -> str:
    return str(getattr(item, "originalname", None) or item.name)


if __name__ == "__main__":
    main()
