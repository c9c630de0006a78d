"""Fault injection in a server: received data in pieces, event loops that wake early, child processes.

What is marked elsewhere too is in `sagellm.core.chaos`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any, cast

from sagellm.core.chaos import CHAOS, VARIABLE, Chaos, F, FaultPoint

if TYPE_CHECKING:
    import selectors

_children = count(1)


def notice() -> str:
    """Return what a program adds to its start message: "" without chaos."""
    return "" if CHAOS is None else f"; {VARIABLE}={CHAOS.seed} injects faults"


def child_environment() -> dict[str, str] | None:
    """Return the environment for a child process; None, to inherit this one's, without chaos.

    Its seed is derived from this one's, such as 7.1: with the same seed, a restarted process would die at the
    same call each time.
    """
    return None if CHAOS is None else {**os.environ, VARIABLE: f"{CHAOS.seed}.{next(_children)}"}


def in_pieces(
    name: str, is_closed: Callable[[Any], bool], *, chaos: Chaos | None = CHAOS
) -> Callable[[F], F]:
    """Mark a protocol's `data_received`: data is delivered in pieces, until `is_closed` returns True."""

    def mark(receive: F) -> F:
        if chaos is None:
            return receive
        point = chaos.point(name)

        @functools.wraps(receive)
        def call(protocol: Any, data: bytes) -> None:
            start = 0
            while start < len(data) and not is_closed(protocol):
                injection = point.draw()
                point.wait(injection)
                size = point.cut(injection, len(data) - start)
                receive(protocol, data[start : start + size])
                start += size

        return call  # type: ignore[return-value]

    return mark


def flaky_selector(
    name: str, given: selectors.BaseSelector, *, chaos: Chaos | None = CHAOS
) -> selectors.BaseSelector:
    """Mark a selector: it is late, or returns early with none or some of the ready events."""
    return (
        given if chaos is None else cast("selectors.BaseSelector", _FlakySelector(given, chaos.point(name)))
    )


class _FlakySelector:
    """Another selector, but for `select`."""

    def __init__(self, given: selectors.BaseSelector, point: FaultPoint) -> None:
        self._given, self._point = given, point

    def __getattr__(self, name: str) -> Any:
        return getattr(self._given, name)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait, or return at once with none or some of the ready events."""
        injection = self._point.draw()
        self._point.wait(injection)
        if not injection.is_early:
            return self._given.select(timeout)
        self._point.note("early return")
        ready = self._given.select(0)
        return ready[: int(len(ready) * (injection.share or 0.0) * 2)]
