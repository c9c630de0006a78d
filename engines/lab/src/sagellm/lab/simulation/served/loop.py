"""An asyncio event loop on virtual time: it never waits, but moves its clock to whatever is due next."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from sagellm.core import VirtualClock
from sagellm.lab.simulation.served.network import Network, SimSocket, SimTransport

_POLL_S = 0.001
"""How often a reader is called again while it leaves something unread, as a real loop would at once."""

_MAX_BUSY_TURNS = 20_000
"""Turns of the loop without progress of time after which it counts as stuck; a few are usual."""

_MAX_S = 3600.0
"""Virtual time after which a run counts as stuck."""


class StuckError(Exception):
    """The run would never end: nothing is due, time does not pass, or an hour has passed."""


class _Waiting:
    """Takes the selector's place: instead of waiting, it advances the clock."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._num_busy = 0

    def select(self, timeout: float | None = None) -> list[Any]:
        """Advance the clock by the timeout, at least a nanosecond. Raises StuckError."""
        if timeout is None:
            raise StuckError("nothing is due, but a task waits")
        self._num_busy += 1
        if timeout > 0:
            self._num_busy = 0
            self._clock.advance_ns(max(1, round(timeout * 1e9)))
        if self._num_busy > _MAX_BUSY_TURNS:
            raise StuckError("callbacks follow each other without end")
        if self._clock.now_ns() > _MAX_S * 1e9:
            raise StuckError(f"{_MAX_S:g} s have passed")
        return []

    def close(self) -> None:
        """Do nothing."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs everything in one thread; connections and readers are those of a simulated network.

    Callbacks run in the order in which they are due or called for, as asyncio promises. So a run depends
    only on the seeds from which delays are drawn.
    """

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self.clock = clock
        self.network: Network | None = None
        self._selector = _Waiting(clock)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self.clock.now_ns() / 1e9

    async def create_unix_connection(self, protocol_factory: Any, path: Any = None, **_: Any) -> Any:
        """Connect to a listener of the network. Raises OSError as the system would."""
        assert self.network is not None, "the network is set before a connection is made"
        return self.open_end(self.network.connect(str(path)), protocol_factory)

    async def connect_accepted_socket(self, protocol_factory: Any, sock: Any, **_: Any) -> Any:
        """Give an accepted connection a protocol."""
        return self.open_end(cast(SimSocket, sock), protocol_factory)

    def open_end(
        self, end: SimSocket, make: Callable[[], asyncio.BaseProtocol]
    ) -> tuple[SimTransport, asyncio.BaseProtocol]:
        """Give one end of a connection a protocol."""
        protocol = make()
        return SimTransport(self, end, cast(asyncio.Protocol, protocol)), protocol

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        """Call back whenever a simulated socket has something to read."""

        def call() -> None:
            if fd.on_change is look and fd.is_readable:
                callback(*args)
                if fd.on_change is look and fd.is_readable:
                    self.call_later(_POLL_S, call)

        def look() -> None:
            self.call_soon(call)

        fd.on_change = look
        look()

    def remove_reader(self, fd: Any) -> bool:
        """Stop calling back."""
        fd.on_change = None
        return True

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:  # type: ignore[override]
        """Call the function at once: there are no threads."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def _process_events(self, event_list: Any) -> None:
        """Do nothing: data arrives by timers."""

    def _write_to_self(self) -> None:
        """Do nothing: there is no other thread to wake."""
