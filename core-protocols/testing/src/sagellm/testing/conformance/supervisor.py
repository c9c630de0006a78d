"""Runs the kit in another process, and survives a plugin that hangs or crashes its process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from sagellm.core.errors import ConfigError, PluginError, UnknownProviderError, nearest
from sagellm.core.plugins.entry_points import entry_points, normalise
from sagellm.core.plugins.registry import GROUP
from sagellm.testing.conformance.aspects import CONTRACT
from sagellm.testing.conformance.process import Ended, WorkerProcess
from sagellm.testing.conformance.report import CheckResult, Fault, ProviderReport

Progress = Callable[[str], None]
"""Receives what is being tested."""

_MAX_LOST_PROCESSES = 3
_LOADING = "the plugin can be loaded"


class Conformance:
    """The conformance kit on the providers of one installed distribution.

    `timeout_s` limits each test, and the loading of the plugin. Nothing of the plugin is
    imported into this process.
    """

    def __init__(self, distribution: str, *, timeout_s: float = 120.0) -> None:
        known = installed_distributions()
        self._distribution = normalise(distribution)
        self._timeout_s = timeout_s
        if self._distribution not in known:
            raise UnknownProviderError(
                f"no installed distribution with plugins is called {distribution!r}; "
                f"installed: {', '.join(known)}.{nearest(self._distribution, known)}"
            )

    def run(
        self,
        *,
        kind: str | None = None,
        name: str | None = None,
        options: Mapping[str, Any] | None = None,
        sample: str | None = None,
        progress: Progress = lambda _: None,
    ) -> Iterator[ProviderReport]:
        """Yield a report for each provider, or for those of a kind or a name.

        `options`, JSON-serializable, go to the factory of the chosen provider. `sample` is input that it
        needs to act on: for a trace reader the path of a file, for a logits processor the fields of a
        LogitsRequest as JSON. Raises PluginError if the distribution cannot be loaded,
        UnknownProviderError if it has no such provider, ConfigError for options or a sample if there are
        several.
        """
        progress(f"loading {self._distribution}")
        providers = self._providers()
        chosen = [each for each in providers if kind in (None, each[0]) and name in (None, each[1])]
        if not chosen:
            listed = ", ".join(" ".join(each) for each in providers) or "none"
            asked = " ".join(filter(None, (kind, name))) or "provider"
            raise UnknownProviderError(f"{self._distribution} provides no {asked}; it provides: {listed}")
        if (options or sample) and len(chosen) > 1:
            listed = ", ".join(" ".join(each) for each in chosen)
            what = "options go" if options else "a sample goes"
            raise ConfigError(f"{what} to one provider; choose it by kind and name: {listed}")
        for kind_of_it, name_of_it in chosen:
            task = {"kind": kind_of_it, "name": name_of_it, "options": dict(options or {}), "sample": sample}
            yield _ProviderRun(self._distribution, task, self._timeout_s, progress).report()

    def _providers(self) -> list[tuple[str, str]]:
        task = {"distribution": self._distribution, "kind": None, "name": None}
        with WorkerProcess(task, self._distribution) as worker:
            found = worker.next_event(self._timeout_s)
            if isinstance(found, Ended):
                raise PluginError(f"{self._distribution} cannot be loaded: {found.sentence}")
        if found["error"] is not None:
            raise PluginError(found["error"])
        return [(kind, name) for kind, name in found["providers"]]


def installed_distributions() -> list[str]:
    """Return the names of distributions that have plugins, without importing any."""
    return sorted({entry_point.distribution for entry_point in entry_points(GROUP)})


class _ProviderRun:
    """Runs the tests of one provider, in a new process each time one is lost."""

    def __init__(
        self, distribution: str, task: Mapping[str, Any], timeout_s: float, progress: Progress
    ) -> None:
        self._task: dict[str, Any] = {"distribution": distribution, **task}
        self._timeout_s = timeout_s
        self._progress = progress
        self._results: dict[str, CheckResult] = {}  # by rule
        self._planned: dict[str, tuple[str, str]] = {}  # rule and aspect by test
        self._finished: list[str] = []
        self._current: str | None = None
        self._called: str | None = None  # the last method called before any test
        self._num_calls: Counter[str] = Counter()
        self._methods: list[str] = []
        self._error: tuple[str, str] | None = None  # why the provider could not be made

    def report(self) -> ProviderReport:
        """Run all tests."""
        num_lost = 0
        while num_lost < _MAX_LOST_PROCESSES:
            ended = self._run_process()
            if self._error is not None:
                return self._not_made(*self._error)
            if ended is None:
                break
            num_lost += 1
            self._lose(ended)
            if not self._planned:
                break
        for test in self._planned.keys() - set(self._finished):
            self._add(
                test,
                CheckResult(aspect=self._planned[test][1], rule=self._planned[test][0], outcome="not run"),
            )
        return ProviderReport(
            kind=self._task["kind"],
            name=self._task["name"],
            results=tuple(self._results.values()),
            num_calls={name: self._num_calls[name] for name in self._methods},
            not_checked=tuple(self._not_checked()),
        )

    def _not_checked(self) -> Iterator[str]:
        """Name each method that was never called, with what the skipped tests would need."""
        reasons = dict.fromkeys(each.reason for each in self._results.values() if each.outcome == "skipped")
        why = f" ({'; '.join(reason.removeprefix('Skipped: ') for reason in reasons)})" if reasons else ""
        for name in self._methods:
            if not self._num_calls[name]:
                yield f"{name}{why}"

    def _run_process(self) -> Ended | None:
        """Run the remaining tests; return how the process ended unless it finished them."""
        self._current = self._called = None
        with WorkerProcess(self._task | {"finished": self._finished}, self._task["distribution"]) as worker:
            while True:
                event = worker.next_event(self._timeout_s)
                if isinstance(event, Ended):
                    return event
                if event["event"] == "done":
                    return None
                self._handle(event)

    def _handle(self, event: dict[str, Any]) -> None:
        if event["event"] == "error":
            self._error = (event["type"], event["text"])
        elif event["event"] == "call":
            self._called = event["method"]
        elif event["event"] == "plan":
            self._planned |= {test: (rule, aspect) for test, rule, aspect in event["tests"]}
            self._methods = event["methods"] or self._methods
        elif event["event"] == "start":
            self._current = event["test"]
            number = f"{len(self._finished) + 1} of {len(self._planned)}"
            self._progress(
                f"{self._task['kind']} {self._task['name']} ({number}): {self._planned[event['test']][0]}"
            )
        elif event["event"] == "end":
            rule, aspect = self._planned[event["test"]]
            self._num_calls.update(event["num_calls"])
            fault = event.get("fault")
            if fault is not None:
                fault = Fault(**{**fault, "cases": tuple(fault["cases"]), "calls": tuple(fault["calls"])})
            result = CheckResult(
                aspect=aspect,
                rule=rule,
                outcome=event["outcome"],
                reason=event.get("reason", ""),
                fault=fault,
            )
            self._add(event["test"], result)

    def _lose(self, ended: Ended) -> None:
        method = ended.hung or self._called
        rule, aspect = _LOADING if method is None else f"{method} returns", CONTRACT
        if self._current is not None:
            rule, aspect = self._planned[self._current]
        fault = Fault(rule=rule, meaning="", expected="an answer", found=ended.sentence, cause=ended.sentence)
        self._add(self._current, CheckResult(aspect=aspect, rule=rule, outcome="failed", fault=fault))

    def _add(self, test: str | None, result: CheckResult) -> None:
        """Keep one result per rule: the first fault, with all cases that show it."""
        if test is not None:
            self._finished.append(test)
        known = self._results.get(result.rule)
        if known is None or (known.fault is None and result.outcome != "passed"):
            self._results[result.rule] = result
        elif known.fault is not None and result.fault is not None:
            fault = replace(known.fault, cases=known.fault.cases + result.fault.cases)
            self._results[result.rule] = replace(known, fault=fault)

    def _not_made(self, type_name: str, text: str) -> ProviderReport:
        report = ProviderReport(kind=self._task["kind"], name=self._task["name"])
        if type_name == "UncheckedError":
            return replace(report, unchecked=text)
        fault = Fault(rule=_LOADING, meaning="", expected="no error", found=f"{type_name}: {text}")
        failed = CheckResult(aspect=CONTRACT, rule=_LOADING, outcome="failed", fault=fault)
        return replace(report, results=(failed,))
