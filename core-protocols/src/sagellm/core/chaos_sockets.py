"""Sockets that misbehave; imported only when chaos is on."""

from __future__ import annotations

import errno
import os
import socket
from typing import Any, NamedTuple

from sagellm.core.chaos import Chaos, FaultPoint, Injection

_LOSS_RATE = 1 / 30  # losing a peer ends a process or all its requests, so it is rarer than other errors


class SocketPoints(NamedTuple):
    """The fault points of a socket and of those that it accepts."""

    accept: FaultPoint
    recv: FaultPoint
    send: FaultPoint

    @classmethod
    def of(cls, chaos: Chaos, name: str) -> SocketPoints:
        """Return the points `NAME.accept`, `NAME.recv` and `NAME.send`."""
        return cls(
            chaos.point(f"{name}.accept", errno.ECONNABORTED, errno.EMFILE),
            chaos.point(f"{name}.recv", errno.ECONNRESET, rate=_LOSS_RATE),
            chaos.point(f"{name}.send", errno.EPIPE, errno.ECONNRESET, rate=_LOSS_RATE),
        )


class FlakySocket(socket.socket):
    """A socket that takes over another one's descriptor and timeout."""

    def __init__(self, given: socket.socket, points: SocketPoints) -> None:
        timeout_s = given.gettimeout()
        super().__init__(given.family, given.type, given.proto, fileno=given.detach())
        self.settimeout(timeout_s)
        self._points = points

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a peer, whose socket is flaky too."""
        self._inject(self._points.accept)
        peer, address = super().accept()
        return FlakySocket(peer, self._points), address

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        """Receive, perhaps fewer bytes."""
        point = self._points.recv
        return super().recv(point.cut(self._inject(point), bufsize), flags)

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """Receive, perhaps fewer bytes."""
        point = self._points.recv
        size = point.cut(self._inject(point), nbytes or memoryview(buffer).nbytes)
        return super().recv_into(buffer, size, flags)

    def send(self, data: Any, flags: int = 0, /) -> int:
        """Send, perhaps fewer bytes."""
        point = self._points.send
        injection = self._inject(point)
        with memoryview(data) as view, view[: point.cut(injection, len(view))] as part:
            return super().send(part, flags)

    def _inject(self, point: FaultPoint) -> Injection:
        injection = point.inject()
        if injection.is_early and self.gettimeout() == 0:
            point.note("early return")
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return injection
