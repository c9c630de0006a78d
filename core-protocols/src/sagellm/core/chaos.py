"""Faults on demand, for tests alone: `SAGELLM_CHAOS=7` makes marked places of the production code misbehave.

A mark is a decorator, or wraps an object where it is made. It says what can really happen there: a delay,
fewer bytes than asked for, an early return, an error of the operating system. Without the variable every
mark returns what it was given, so it costs nothing. With it, what happens at a call follows from the seed,
the place and the number of the call: a seed that fails shows the same faults again.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import count
from random import Random
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from sagellm.core.logging import get_logger

if TYPE_CHECKING:
    import selectors
    import socket

VARIABLE = "SAGELLM_CHAOS"
_SEED = re.compile(r"[1-9][0-9]{0,17}(\.[0-9]{1,6}){0,8}")
_MAX_DELAY_S = 0.05

Fault: TypeAlias = int | type[Exception]
"""What a place may raise: an errno, which becomes the OSError of that number, or an exception's type."""

F = TypeVar("F", bound=Callable[..., Any])

_log = get_logger(__name__)


class _Weather(NamedTuple):
    """How often something happens at a place, as shares of its calls."""

    delays: float
    shorts: float  # also early returns
    errors: float


_WEATHERS = (_Weather(0.0, 0.0, 0.0), _Weather(0.02, 0.2, 0.002), _Weather(0.1, 0.8, 0.03))
"""One of them for each place and seed: where everything fails at once, little is reached."""


class Strike(NamedTuple):
    """What happens at one call."""

    delay_s: float | None
    share: float | None  # of what was asked for, logarithmic; None for all of it
    is_early: bool  # returns before there is anything
    error: Exception | None

    def size(self, asked: int) -> int:
        """Return how much of so many bytes is dealt with: between one and all."""
        return asked if self.share is None or asked < 2 else max(1, int(asked**self.share))


class Place:
    """A marked place: counts its calls, and what was done to them. Safe for threads."""

    def __init__(
        self, seed: str, name: str, faults: tuple[Fault, ...], *, rate: float, num_spared: int
    ) -> None:
        self.name = name
        self._seed, self._faults = seed, faults
        self._rate, self._num_spared = rate, num_spared
        self._weather = Random(f"{seed}/{name}").choice(_WEATHERS)
        self._calls = count()
        self._lock = Lock()
        self.injected: Counter[str] = Counter()  # by kind

    def draw(self) -> Strike:
        """Decide what happens at the next call."""
        number, weather = next(self._calls), self._weather
        random = Random(f"{self._seed}/{self.name}/{number}")
        late, delay, short, share, early, fails, fault = (random.random() for _ in range(7))
        error = None
        if self._faults and number >= self._num_spared and fails < weather.errors * self._rate:
            error = _as_error(self._faults[int(fault * len(self._faults))])
        return Strike(
            _MAX_DELAY_S * delay**6 if late < weather.delays else None,  # mostly microseconds
            share if short < weather.shorts else None,
            early < weather.shorts / 5,
            error,
        )

    def note(self, kind: str) -> None:
        """Count what was done."""
        with self._lock:
            self.injected[kind] += 1

    def wait(self, strike: Strike) -> None:
        """Let this thread be late."""
        if strike.delay_s is not None:
            self.note("delay")
            time.sleep(strike.delay_s)

    def fail(self, strike: Strike) -> None:
        """Raise the error."""
        if strike.error is not None:
            self.note(type(strike.error).__name__)
            raise strike.error

    def cut(self, strike: Strike, asked: int) -> int:
        """Return how many bytes of so many the call is to deal with."""
        size = strike.size(asked)
        if size < asked:
            self.note("short")
        return size


class Chaos:
    """The faults of one process: a seed and the places that were marked."""

    def __init__(self, seed: str) -> None:
        self.seed = seed
        self._places: dict[str, Place] = {}
        self._lock = Lock()
        self._children = count(1)

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Chaos | None:
        """Return the chaos that the variable asks for; what is not a seed counts as none, with a warning."""
        seed = environ.get(VARIABLE, "")
        if _SEED.fullmatch(seed):
            return cls(seed)
        if seed:
            _log.warning("%s=%r is not a seed, an integer from 1 on; no faults are injected", VARIABLE, seed)
        return None

    def place(self, name: str, *faults: Fault, rate: float = 1.0, num_spared: int = 0) -> Place:
        """Return the place of a name; errors are `rate` times as frequent, and spare the first calls."""
        with self._lock:
            if name not in self._places:
                self._places[name] = Place(self.seed, name, faults, rate=rate, num_spared=num_spared)
            return self._places[name]

    def injected(self) -> dict[str, int]:
        """Return what was done so far: "place kind" → how often."""
        total: Counter[str] = Counter()
        for place in list(self._places.values()):
            total.update({f"{place.name} {kind}": number for kind, number in place.injected.items()})
        return dict(sorted(total.items()))

    def child_environment(self) -> dict[str, str]:
        """Return the environment for a process started by this one: a seed of its own, as in 7.1.

        With the same seed a process that is started again would end at the same call again.
        """
        return {**os.environ, VARIABLE: f"{self.seed}.{next(self._children)}"}

    def report(self) -> None:
        """Log what was done."""
        done = ", ".join(f"{what} x {number}" for what, number in self.injected().items())
        _log.warning("%s=%s injected %s", VARIABLE, self.seed, done or "nothing")


def _from_environment() -> Chaos | None:
    chaos = Chaos.of(os.environ)
    if chaos is not None:
        _log.warning("%s=%s: faults are injected on purpose; this is for tests", VARIABLE, chaos.seed)
        atexit.register(chaos.report)
    return chaos


CHAOS = _from_environment()
"""This process's, decided once; None unless the variable is set. Marks read it where they are made."""


def note() -> str:
    """Return what a program says at its start: "" without chaos."""
    return "" if CHAOS is None else f"; {VARIABLE}={CHAOS.seed} injects faults"


def child_environment() -> dict[str, str] | None:
    """Return the environment for a process that is started; None, for this one's, without chaos."""
    return None if CHAOS is None else CHAOS.child_environment()


def flaky(
    name: str, *faults: Fault, rate: float = 1.0, num_spared: int = 0, chaos: Chaos | None = CHAOS
) -> Callable[[F], F]:
    """Mark a function or a coroutine function that may be late, or fail before it has done anything.

    Errors are `rate` times as frequent as elsewhere, for what is rarely called, and spare the first calls.
    """

    def mark(function: F) -> F:
        if chaos is None:
            return function
        import asyncio  # not where a program only lists plugins

        place = chaos.place(name, *faults, rate=rate, num_spared=num_spared)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            strike = place.draw()
            place.wait(strike)
            place.fail(strike)
            return function(*args, **kwargs)

        @functools.wraps(function)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            strike = place.draw()
            if strike.delay_s is not None:
                place.note("delay")
                await asyncio.sleep(strike.delay_s)
            place.fail(strike)
            return await function(*args, **kwargs)

        return call_async if inspect.iscoroutinefunction(function) else call  # type: ignore[return-value]

    return mark


def flaky_vector(name: str, *faults: Fault, chaos: Chaos | None = CHAOS) -> Callable[[F], F]:
    """Mark `os.preadv` or `os.pwritev`: late, failing, or done with a part of what was asked for."""

    def mark(function: F) -> F:
        if chaos is None:
            return function
        place = chaos.place(name, *faults)

        @functools.wraps(function)
        def call(descriptor: int, buffers: Any, offset: int, *flags: int) -> Any:
            strike = place.draw()
            place.wait(strike)
            place.fail(strike)
            left = place.cut(strike, sum(map(len, buffers)))
            parts = []
            for buffer in buffers:
                parts.append(memoryview(buffer)[:left])
                left -= len(parts[-1])
            return function(descriptor, [part for part in parts if len(part)], offset, *flags)

        return call  # type: ignore[return-value]

    return mark


def in_pieces(
    name: str, is_closed: Callable[[Any], bool], *, chaos: Chaos | None = CHAOS
) -> Callable[[F], F]:
    """Mark a protocol's `data_received`: what came together comes in pieces, until `is_closed` says so."""

    def mark(receive: F) -> F:
        if chaos is None:
            return receive
        place = chaos.place(name)

        @functools.wraps(receive)
        def call(protocol: Any, data: bytes) -> None:
            start = 0
            while start < len(data) and not is_closed(protocol):
                strike = place.draw()
                place.wait(strike)
                size = place.cut(strike, len(data) - start)
                receive(protocol, data[start : start + size])
                start += size

        return call  # type: ignore[return-value]

    return mark


def flaky_socket(name: str, given: socket.socket, *, chaos: Chaos | None = CHAOS) -> socket.socket:
    """Mark a listening or connected socket, and what it accepts: `NAME.accept`, `NAME.recv`, `NAME.send`.

    It is late; it does part of what was asked for; it has nothing after all, where it does not wait; rarely
    it loses its peer.
    """
    if chaos is None:
        return given
    from sagellm.core.chaos_sockets import FlakySocket, SocketPlaces

    return FlakySocket(given, SocketPlaces.of(chaos, name))


def flaky_selector(
    name: str, given: selectors.BaseSelector, *, chaos: Chaos | None = CHAOS
) -> selectors.BaseSelector:
    """Mark a selector: it is late, returns before its time with nothing, or with some of what is ready."""
    if chaos is None:
        return given
    from sagellm.core.chaos_sockets import FlakySelector

    return FlakySelector(given, chaos.place(name))


def _as_error(fault: Fault) -> Exception:
    if isinstance(fault, int):
        return OSError(fault, os.strerror(fault))
    return fault("injected")
