"""Providers with one method broken, and the tests of the kit on them, one by one in this process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest

from sagellm.testing.calls import Calls
from sagellm.testing.conformance.aspects import rule_of


class PlantedError(Exception):
    """What a broken method raises."""


def raises(*_: Any, **__: Any) -> Any:
    raise PlantedError


def does_nothing(*_: Any, **__: Any) -> Any:
    return None


FAULTS = {"raises": raises, "does nothing": does_nothing}


def breaking(factory: Callable[..., Any], method: str, fault: str) -> Callable[..., Any]:
    """Return a factory of the same, with one method that is broken."""
    classes: dict[type, type] = {}

    def make(*arguments: Any, **options: Any) -> Any:
        made = factory(*arguments, **options)
        whole = type(made)
        if whole not in classes:
            is_property = isinstance(inspect.getattr_static(whole, method), property)
            broken = property(FAULTS[fault]) if is_property else FAULTS[fault]
            classes[whole] = type(whole.__name__, (whole,), {"__slots__": (), method: broken})
        object.__setattr__(made, "__class__", classes[whole])
        return made

    make.__signature__ = inspect.signature(factory)  # type: ignore[attr-defined]
    return make


class Unwatched:
    """Stands for what counts calls."""

    num_calls: dict[str, int] = {}  # noqa: RUF012

    def watch(self, made: object) -> None:
        """Count nothing."""


def failures(contract: type, rule: str | None = None) -> Iterator[str]:
    """Yield each rule of a contract that is broken, of all or of one; those that are skipped hold."""
    for name in sorted(name for name in dir(contract) if name.startswith("test_")):
        if rule in (None, rule_of(name)) and not _holds(contract, name):
            yield rule_of(name)


def _holds(contract: type, name: str) -> bool:
    marks = getattr(getattr(contract, name), "pytestmark", [])
    if any(mark.name == "full" for mark in marks):
        return True
    cases = [_cases(*mark.args[:2]) for mark in marks if mark.name == "parametrize"]
    for case in product(*cases):
        test = contract()
        test.calls, test.exercised = Calls(is_on=False), Unwatched()
        function = getattr(test, name)
        given = {key: value for each in case for key, value in each.items()}
        if "torch" in inspect.signature(function).parameters:
            given["torch"] = pytest.importorskip("torch")
        try:
            function(**given)
        except pytest.skip.Exception:
            continue
        except BaseException:  # also what pytest.fail raises
            return False
    return True


def _cases(names: Any, values: Any) -> list[dict[str, Any]]:
    split = [each.strip() for each in names.split(",")] if isinstance(names, str) else list(names)
    return [dict(zip(split, value if len(split) > 1 else (value,), strict=True)) for value in values]
