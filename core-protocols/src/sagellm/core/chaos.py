"""Fault injection, for tests only: `SAGELLM_CHAOS=7` makes fault points in the production code misbehave.

A mark is a decorator, or wraps an object where it is created. It declares what can really happen there: a
delay, a short read or write, an early return, an operating-system error. Without the variable every mark
returns its argument unchanged and costs nothing. With it, the fault at each call is a function of the seed,
the point's name and the call's number, so a failing seed reproduces its faults.
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

from sagellm.core._lazy import lazy
from sagellm.core._moved import with_moved_names
from sagellm.core.logging import get_logger

if TYPE_CHECKING:
    import socket

VARIABLE = "SAGELLM_CHAOS"
_SEED = re.compile(r"[1-9][0-9]{0,17}(\.[0-9]{1,6}){0,8}")
_MAX_DELAY_S = 0.05

Fault: TypeAlias = int | type[Exception]
"""What a point may raise: an errno, which becomes an OSError, or an exception type."""

F = TypeVar("F", bound=Callable[..., Any])

_log = get_logger(__name__)


class _Rates(NamedTuple):
    """How often faults occur at a point, as fractions of its calls."""

    delays: float
    shorts: float  # also early returns
    errors: float


_LEVELS = (_Rates(0.0, 0.0, 0.0), _Rates(0.02, 0.2, 0.002), _Rates(0.1, 0.8, 0.03))
"""Calm, mild and wild; each seed gives each point one: a run in which everything fails reaches little."""


class Injection(NamedTuple):
    """The faults of one call."""

    delay_s: float | None
    share: float | None  # exponent of the size asked for, 0 to 1; None leaves it whole
    is_early: bool  # return before anything is ready
    error: Exception | None

    def size(self, asked: int) -> int:
        """Return how many of the bytes asked for to transfer: at least one."""
        return asked if self.share is None or asked < 2 else max(1, int(asked**self.share))


class FaultPoint:
    """A marked point in the code: counts its calls and the faults injected there. Thread-safe."""

    def __init__(
        self, seed: str, name: str, faults: tuple[Fault, ...], *, rate: float, num_spared: int
    ) -> None:
        self.name = name
        self._seed, self._faults = seed, faults
        self._rate, self._num_spared = rate, num_spared
        self._rates = Random(f"{seed}/{name}").choice(_LEVELS)
        self._calls = count()
        self._lock = Lock()
        self.injected: Counter[str] = Counter()  # by kind

    def draw(self) -> Injection:
        """Draw the faults of the next call."""
        number, rates = next(self._calls), self._rates
        random = Random(f"{self._seed}/{self.name}/{number}")
        late, delay, short, share, early, fails, fault = (random.random() for _ in range(7))
        error = None
        if self._faults and number >= self._num_spared and fails < rates.errors * self._rate:
            error = _as_error(self._faults[int(fault * len(self._faults))])
        return Injection(
            _MAX_DELAY_S * delay**6 if late < rates.delays else None,  # mostly microseconds
            share if short < rates.shorts else None,
            early < rates.shorts / 5,
            error,
        )

    def note(self, kind: str) -> None:
        """Count an injected fault."""
        with self._lock:
            self.injected[kind] += 1

    def inject(self) -> Injection:
        """Draw the faults of the next call, sleep for the delay, and raise the error, if any."""
        injection = self.draw()
        self.wait(injection)
        self.fail(injection)
        return injection

    def wait(self, injection: Injection) -> None:
        """Sleep for the delay, if any."""
        if injection.delay_s is not None:
            self.note("delay")
            time.sleep(injection.delay_s)

    def fail(self, injection: Injection) -> None:
        """Raise the error, if any."""
        if injection.error is not None:
            self.note(type(injection.error).__name__)
            raise injection.error

    def cut(self, injection: Injection, asked: int) -> int:
        """Return how many of the bytes asked for this call transfers, and count a short one."""
        size = injection.size(asked)
        if size < asked:
            self.note("short")
        return size


class Chaos:
    """The fault injection of one process: its seed and its points."""

    def __init__(self, seed: str) -> None:
        self.seed = seed
        self._points: dict[str, FaultPoint] = {}
        self._lock = Lock()

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Chaos | None:
        """Read the seed from the environment; an invalid one disables injection, with a warning."""
        seed = environ.get(VARIABLE, "")
        if _SEED.fullmatch(seed):
            return cls(seed)
        if seed:
            _log.warning(
                "%s=%r is not a seed (an integer of at least 1); no faults are injected", VARIABLE, seed
            )
        return None

    def point(self, name: str, *faults: Fault, rate: float = 1.0, num_spared: int = 0) -> FaultPoint:
        """Return the named point, with errors `rate` times as frequent and none in the first calls."""
        with self._lock:
            if name not in self._points:
                self._points[name] = FaultPoint(self.seed, name, faults, rate=rate, num_spared=num_spared)
            return self._points[name]

    def injected(self) -> dict[str, int]:
        """Return the counts of injected faults: "point kind" → number."""
        total: Counter[str] = Counter()
        for point in list(self._points.values()):
            total.update({f"{point.name} {kind}": number for kind, number in point.injected.items()})
        return dict(sorted(total.items()))

    def report(self) -> None:
        """Log the counts of injected faults."""
        done = ", ".join(f"{fault} x {number}" for fault, number in self.injected().items())
        _log.warning("%s=%s injected %s", VARIABLE, self.seed, done or "nothing")


def _from_environment() -> Chaos | None:
    chaos = Chaos.of(os.environ)
    if chaos is not None:
        _log.warning("%s=%s: faults are injected on purpose; this is for tests", VARIABLE, chaos.seed)
        atexit.register(chaos.report)
    return chaos


CHAOS = _from_environment()
"""Read once, when this module is imported; None unless the variable has a seed."""


def flaky(
    name: str, *faults: Fault, rate: float = 1.0, num_spared: int = 0, chaos: Chaos | None = CHAOS
) -> Callable[[F], F]:
    """Mark a function or coroutine function that may be late, or fail before it has any effect.

    Give rarely called functions a `rate` above 1; the first `num_spared` calls raise no error.
    """

    def mark(function: F) -> F:
        if chaos is None:
            return function
        import asyncio  # keeps it out of commands that only list plugins

        point = chaos.point(name, *faults, rate=rate, num_spared=num_spared)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            point.inject()
            return function(*args, **kwargs)

        @functools.wraps(function)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            injection = point.draw()
            if injection.delay_s is not None:
                point.note("delay")
                await asyncio.sleep(injection.delay_s)
            point.fail(injection)
            return await function(*args, **kwargs)

        return call_async if inspect.iscoroutinefunction(function) else call  # type: ignore[return-value]

    return mark


def flaky_vector(name: str, *faults: Fault, chaos: Chaos | None = CHAOS) -> Callable[[F], F]:
    """Mark `os.preadv` or `os.pwritev`: late, failing, or transferring fewer bytes than asked for."""

    def mark(function: F) -> F:
        if chaos is None:
            return function
        point = chaos.point(name, *faults)

        @functools.wraps(function)
        def call(descriptor: int, buffers: Any, offset: int, *flags: int) -> Any:
            injection = point.inject()
            left = point.cut(injection, sum(map(len, buffers)))
            parts = []
            for buffer in buffers:
                parts.append(memoryview(buffer)[:left])
                left -= len(parts[-1])
            return function(descriptor, [part for part in parts if len(part)], offset, *flags)

        return call  # type: ignore[return-value]

    return mark


def flaky_socket(name: str, given: socket.socket, *, chaos: Chaos | None = CHAOS) -> socket.socket:
    """Mark a socket and those that it accepts, as the points `NAME.accept`, `NAME.recv` and `NAME.send`.

    Calls are late, transfer fewer bytes than asked for, raise BlockingIOError on a non-blocking socket or,
    rarely, lose the peer.
    """
    if chaos is None:
        return given
    from sagellm.core.chaos_sockets import FlakySocket, SocketPoints

    return FlakySocket(given, SocketPoints.of(chaos, name))


def _as_error(fault: Fault) -> Exception:
    if isinstance(fault, int):
        return OSError(fault, os.strerror(fault))
    return fault("injected")


_MOVED = {"sagellm.server.chaos": "child_environment flaky_selector in_pieces notice"}

__getattr__ = with_moved_names(__name__, lazy(__name__, {}), _MOVED)
