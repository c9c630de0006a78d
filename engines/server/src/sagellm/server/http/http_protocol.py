"""HTTP/1.1 connections with limits on headers, on waiting, and on their number."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from sagellm.server.chaos import in_pieces
from sagellm.server.http.access_log import log_refused
from sagellm.server.http.connections import Connections, peer_of
from sagellm.server.http.errors import APIError
from sagellm.server.http.request_parser import RequestParser

_HEADER_TIMEOUT_S = 10.0
_STALL_TIMEOUT_S = 60.0
_HALF_CLOSED_S = 0.25
"""Time after a client closes its sending half until it is first probed."""
_MAX_HALF_CLOSED_S = 4.0
_MAX_UNREAD_BYTES = 64 << 10
"""Unparsed bytes above which a connection is paused; below, it is read, so that its end is noticed."""
_HAS_TCP_INFO = hasattr(socket, "TCP_INFO")
_TCP_CLOSE = 7


class _Flow(FlowControl):
    """Flow control that keeps a connection paused while much of what it sent has not been parsed."""

    def __init__(self, transport: asyncio.Transport, has_much: Callable[[], bool]) -> None:
        super().__init__(transport)
        self._has_much = has_much

    def resume_reading(self) -> None:
        """Resume reading, unless much has not been parsed."""
        if not self._has_much():
            super().resume_reading()


class BoundedHTTP(HttpToolsProtocol):
    """HTTP/1.1 with time limits for heads and for clients that read too slowly, and bounded headers.

    A request is read once the one before it is answered, and a few hundred lines at a time, between which
    other connections have their turns. Refused requests never reach the application, so they are logged here
    if `is_logged`.
    """

    def __init__(self, *args: Any, connections: Connections, is_logged: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        self.peer: str | None = None
        self._connections = connections
        self._is_logged = is_logged
        self.url = b""
        self.parser: RequestParser = RequestParser(self)  # type: ignore[assignment]
        self._unread = b""
        self._turn: asyncio.Handle | None = None
        self._has_eof = False
        self._deadline: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._probe: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Register the connection and start to wait for headers."""
        super().connection_made(transport)
        self.flow = _Flow(transport, lambda: len(self._unread) > _MAX_UNREAD_BYTES)
        self.peer = peer_of(self.client[0]) if self.client else None
        refusal = self._connections.add(self)
        self._is_probe_only = refusal is not None
        if refusal is not None:
            self.app_state = {**self.app_state, "refusal": refusal}
        self._start_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel all timers and unregister."""
        for timer in (self._turn, self._deadline, self._stall, self._probe):
            if timer is not None:
                timer.cancel()
        self._connections.remove(self)
        self._connections.num_open -= 1
        super().connection_lost(exc)

    def abort(self) -> None:
        """Close the connection at once, to make room for others."""
        self.transport.abort()

    def pause_writing(self) -> None:
        """Start to wait for a client that reads slowly."""
        super().pause_writing()
        if self._stall is None:
            self._stall = self.loop.call_later(_STALL_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop waiting: the client reads again."""
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        super().resume_writing()

    @in_pieces("http.receive", lambda self: self.transport.is_closing())
    def data_received(self, data: bytes) -> None:
        """Read a request, now or when its turn comes."""
        self._unread += data
        if self._turn is None:
            self._take_turn()
        if len(self._unread) > _MAX_UNREAD_BYTES:
            self.flow.pause_reading()

    def _take_turn(self) -> None:
        """Parse more of the current request, or of the next once that is answered; refuse what is invalid."""
        self._turn = None
        self._unset_keepalive_if_required()
        if self.transport.is_closing():
            self._unread = b""
            return
        if self._is_idle or self.cycle.more_body:
            try:
                num_read = self.parser.feed_data(self._unread)
            except APIError as refusal:
                self._unread = b""
                self._refuse(refusal)
                return
            self._unread = self._unread[num_read:]
            self._read_on()
        if self._is_idle:  # this is not part of a running request, which has its own timers
            self._start_deadline()

    def _read_on(self) -> None:
        """Schedule the next turn if something is left to parse, else read more from the client."""
        if self._unread:
            if self._turn is None and (self._is_idle or self.cycle.more_body):
                self._turn = self.loop.call_soon(self._take_turn)
        elif self._has_eof:
            if self._is_idle or self.cycle.more_body:
                self.transport.close()
        elif self.cycle is None or len(self.cycle.body) <= HIGH_WATER_LIMIT:
            self.flow.resume_reading()

    def on_headers_complete(self) -> None:
        """Start a request."""
        self._stop_deadline()
        self._connections.mark_busy(self)
        is_http_1_0 = self.parser.get_http_version() == "1.0"
        if is_http_1_0:
            self.expect_100_continue = False  # RFC 9110, section 10.1.1
        super().on_headers_complete()
        self.url = b""  # in the scope now; else the next request might be logged with it
        if self._is_probe_only:
            self.cycle.keep_alive = False
        if is_http_1_0:
            self.cycle.send = _without_chunks(self.cycle)  # type: ignore[assignment,method-assign]

    def on_response_complete(self) -> None:
        """Wait for the next request, after the rest of this one's body if that was not read."""
        super().on_response_complete()
        if self.transport.is_closing():
            return
        self._connections.mark_idle(self)
        if self._unread or not self.parser.is_between_requests:
            self._start_deadline()
        self._read_on()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Continue the running request: a client may close its sending half and wait for the answer."""
        is_waiting = self._turn is None and (self._is_idle or self.cycle.more_body)
        if is_waiting or not _HAS_TCP_INFO:
            return False
        self._has_eof = True
        if self.cycle is not None and not self._unread:
            self.cycle.keep_alive = False
        self._probe = self.loop.call_later(_HALF_CLOSED_S, self._probe_client, _HALF_CLOSED_S)
        return True

    def _refuse(self, error: APIError) -> None:
        """Send an error and close; abort if a response has begun."""
        if self.transport.is_closing():
            return
        if self._is_idle:
            if self.parser.is_in_body:  # of a request that is answered
                self.transport.close()
                return
            self._log(error)
        else:
            self.cycle.scope["state"]["failure"] = error.code  # for the access log
            if self.cycle.response_started:
                self.transport.abort()
                return
            self.cycle.scope["state"]["status"] = error.status  # whatever the application answers later
        head = b"HTTP/1.1 %d %b\r\n" % (error.status, HTTPStatus(error.status).phrase.encode())
        kind = b"Connection: close\r\nContent-Type: application/json\r\n"
        self.transport.write(head + kind + b"Content-Length: %d\r\n\r\n" % len(error.encoded) + error.encoded)
        self.transport.close()

    def _log(self, error: APIError) -> None:
        """Log a refused request, with its method and path if the parser has come that far."""
        if self._is_logged:
            method = self.parser.get_method() if self.url else b""
            path = self.url.partition(b"?")[0]
            log_refused(method.decode("latin-1"), path.decode("latin-1"), error, self.client)

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _start_deadline(self) -> None:
        """Start the time limit for the next head, which further bytes do not extend."""
        if self._deadline is None:
            self._deadline = self.loop.call_later(_HEADER_TIMEOUT_S, self._give_up)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        if self._is_idle and not self.transport.is_closing():
            self.transport.close()

    def _probe_client(self, waited_s: float) -> None:
        """Probe a half-closed client by sending something: if it is gone, its system replies with a reset.

        Before a response the probe is `100 Continue`, which HTTP/1.1 clients skip; once a response has begun,
        its own bytes are the probe.
        """
        self._probe = None
        if self._is_idle or self.transport.is_closing():
            return
        if _is_reset(self.transport):
            self.transport.abort()
            return
        cycle = self.cycle
        if not cycle.response_started and cycle.scope["http_version"] == "1.1":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        wait_s = min(2 * waited_s, _MAX_HALF_CLOSED_S)
        self._probe = self.loop.call_later(wait_s, self._probe_client, wait_s)


def _without_chunks(cycle: RequestResponseCycle) -> Callable[[Any], Awaitable[None]]:
    """Return a `send` for HTTP/1.0, which has no chunks: a body without a length ends by closing."""
    send, is_open = cycle.send, False

    async def answer(message: Any) -> None:
        nonlocal is_open
        if message["type"] == "http.response.start":
            is_open = all(name.lower() != b"content-length" for name, _ in message["headers"])
            if is_open:
                cycle.chunked_encoding = False  # the connection is not kept alive anyway
        elif is_open:
            cycle.expected_content_length = len(message["body"])
        await send(message)

    return answer


def _is_reset(transport: asyncio.Transport) -> bool:
    """Say whether the peer has reset the connection; event loops do not report it while reading is paused."""
    with suppress(OSError):
        state: int = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        return state == _TCP_CLOSE
    return False
