"""Sockets and selectors that misbehave; imported where chaos is on."""

from __future__ import annotations

import errno
import os
import selectors
import socket
from collections.abc import Mapping
from typing import Any, NamedTuple

from sagellm.core.chaos import Chaos, Place, Strike

_LOSSES = 1 / 30
"""Of peers, as against other errors: each ends much."""


class SocketPlaces(NamedTuple):
    """What is marked of one socket and of those that it accepts."""

    accept: Place
    recv: Place
    send: Place

    @classmethod
    def of(cls, chaos: Chaos, name: str) -> SocketPlaces:
        """Mark them. To lose a peer ends much, and is rare."""
        return cls(
            chaos.place(f"{name}.accept", errno.ECONNABORTED, errno.EMFILE),
            chaos.place(f"{name}.recv", errno.ECONNRESET, rate=_LOSSES),
            chaos.place(f"{name}.send", errno.EPIPE, errno.ECONNRESET, rate=_LOSSES),
        )


class FlakySocket(socket.socket):
    """A socket that takes over another one's descriptor and timeout."""

    def __init__(self, given: socket.socket, places: SocketPlaces) -> None:
        timeout_s = given.gettimeout()
        super().__init__(given.family, given.type, given.proto, fileno=given.detach())
        self.settimeout(timeout_s)
        self._places = places

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept, or fail; the peer's socket is flaky, too."""
        self._strike(self._places.accept)
        peer, address = super().accept()
        return FlakySocket(peer, self._places), address

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        """Receive fewer bytes."""
        place = self._places.recv
        return super().recv(place.cut(self._strike(place), bufsize), flags)

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """Receive fewer bytes."""
        place = self._places.recv
        size = place.cut(self._strike(place), nbytes or memoryview(buffer).nbytes)
        return super().recv_into(buffer, size, flags)

    def send(self, data: Any, flags: int = 0, /) -> int:
        """Send fewer bytes."""
        place = self._places.send
        strike = self._strike(place)
        with memoryview(data) as view, view[: place.cut(strike, len(view))] as part:
            return super().send(part, flags)

    def _strike(self, place: Place) -> Strike:
        strike = place.draw()
        place.wait(strike)
        place.fail(strike)
        if strike.is_early and self.gettimeout() == 0:
            place.note("early return")
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return strike


class FlakySelector(selectors.BaseSelector):
    """A selector that asks another one."""

    def __init__(self, given: selectors.BaseSelector, place: Place) -> None:
        self._given, self._place = given, place

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """Pass it on."""
        return self._given.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        """Pass it on."""
        return self._given.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """Pass it on."""
        return self._given.modify(fileobj, events, data)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        """Pass it on."""
        return self._given.get_map()

    def close(self) -> None:
        """Pass it on."""
        self._given.close()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait, or return at once with some of what is ready."""
        strike = self._place.draw()
        self._place.wait(strike)
        if not strike.is_early:
            return self._given.select(timeout)
        self._place.note("early return")
        ready = self._given.select(0)
        return ready[: int(len(ready) * (strike.share or 0.0) * 2)]
