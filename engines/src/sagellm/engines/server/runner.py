"""The server around the application: its socket, its signals, the limits that HTTP itself needs."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from sagellm.core.chaos import in_pieces
from sagellm.engines.config.sections import ServerConfig
from sagellm.engines.server.admission import Admission
from sagellm.engines.server.connections import Connections, fit_to_files, peer_of
from sagellm.engines.server.errors import APIError
from sagellm.engines.server.framing import Framing
from sagellm.engines.server.listener import Listener

_HEADER_TIMEOUT_S = 10.0
_STALL_TIMEOUT_S = 60.0
_LAST_WORDS_S = 2.0
"""How long requests have to end with an error, once their time to drain is over."""
_HALF_CLOSED_S = 0.25
"""How long after the end of what a client sends it is first asked whether it is still there."""
_MAX_HALF_CLOSED_S = 4.0
_HAS_TCP_INFO = hasattr(socket, "TCP_INFO")
_TCP_CLOSE = 7


class BoundedHTTP(HttpToolsProtocol):
    """HTTP/1.1 with an end to headers and to waiting: for a request, and for who does not read the answer."""

    def __init__(self, *args: Any, connections: Connections, **options: Any) -> None:
        super().__init__(*args, **options)
        self.peer: str | None = None
        self._connections = connections
        self._framing = Framing()
        self._deadline: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._probe: asyncio.TimerHandle | None = None
        self._refusal: APIError | None = None
        self._is_in_headers = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for headers, or make this a guest."""
        super().connection_made(transport)
        self.peer = peer_of(self.client[0]) if self.client else None
        refusal = self._connections.enter(self)
        self._is_guest = refusal is not None
        if refusal is not None:
            self.app_state = {**self.app_state, "refusal": refusal}
        self._start_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        for timer in (self._deadline, self._stall, self._probe):
            if timer is not None:
                timer.cancel()
        self._connections.leave(self)
        self._connections.num_open -= 1
        super().connection_lost(exc)

    def end(self) -> None:
        """Make room for others."""
        self.transport.abort()

    def pause_writing(self) -> None:
        """Begin to wait for a client that reads slowly."""
        super().pause_writing()
        if self._stall is None:
            self._stall = self.loop.call_later(_STALL_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop waiting: it reads."""
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        super().resume_writing()

    @in_pieces("http.receive", lambda self: self.transport.is_closing())
    def data_received(self, data: bytes) -> None:
        """Read on, a message at a time, unless something must not be there."""
        try:
            while data and not self.transport.is_closing():
                size = self._framing.next_piece(data)
                super().data_received(data[:size])
                if self._refusal is not None:
                    raise self._refusal
                data = data[size:]
        except APIError as refusal:
            self._refuse(refusal)
            return
        if self._is_idle:  # what came belongs to no request that runs; no other timer waits for the rest
            self._start_deadline()

    def on_message_begin(self) -> None:
        """Begin to take headers."""
        super().on_message_begin()
        self._is_in_headers = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; trailers are passed over."""
        if self._is_in_headers:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin a request, unless its head or what it announces is refused."""
        self._is_in_headers = False
        try:
            self._framing.begin_body(self.headers, self.parser.get_http_version())
        except APIError as refusal:  # the parser keeps exceptions to itself
            self._refusal = refusal
            return
        self._stop_deadline()
        self._connections.begin(self)
        super().on_headers_complete()
        if self._is_guest:
            self.cycle.keep_alive = False
        if self.parser.get_http_version() == "1.0":
            self.cycle.send = _without_chunks(self.cycle)  # type: ignore[assignment,method-assign]

    def on_message_complete(self) -> None:
        """End a request that was not refused."""
        if self._refusal is None:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Wait for the next request, or for the rest of this one, which nobody reads."""
        super().on_response_complete()
        if self._is_idle and not self.transport.is_closing():
            self._connections.rest(self)
            if not self._framing.is_between:
                self._start_deadline()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Go on with what was asked: a client may close its half of the connection and wait."""
        if self._is_idle or self.cycle.more_body or not _HAS_TCP_INFO:
            return False
        self.cycle.keep_alive = False
        self._probe = self.loop.call_later(_HALF_CLOSED_S, self._ask_client, _HALF_CLOSED_S)
        return True

    def send_400_response(self, msg: str) -> None:
        """Refuse malformed HTTP."""
        self._refuse(APIError(400, msg, code="bad_http"))

    def _refuse(self, error: APIError) -> None:
        """Answer and close; abort if an answer has begun, as nothing may be mixed into it."""
        if self.transport.is_closing():
            return
        if not self._is_idle and self.cycle.response_started:
            self.transport.abort()
            return
        head = b"HTTP/1.1 %d %b\r\n" % (error.status, HTTPStatus(error.status).phrase.encode())
        kind = b"Connection: close\r\nContent-Type: application/json\r\n"
        self.transport.write(head + kind + b"Content-Length: %d\r\n\r\n" % len(error.encoded) + error.encoded)
        self.transport.close()

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _start_deadline(self) -> None:
        """Begin to wait for the next head. More bytes give no more time."""
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

    def _ask_client(self, waited_s: float) -> None:
        """Find out whether the client that sends no more still waits, by sending it something.

        If it is gone, its system answers with a reset. What is sent before an answer is `100 Continue`,
        which clients of HTTP/1.1 pass over; an answer that has begun will be written to soon enough.
        """
        self._probe = None
        if self._is_idle or self.transport.is_closing():
            return
        if _is_reset(self.transport):
            self.transport.abort()
            return
        cycle = self.cycle
        if not cycle.response_started and not self.pipeline and cycle.scope["http_version"] == "1.1":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        wait_s = min(2 * waited_s, _MAX_HALF_CLOSED_S)
        self._probe = self.loop.call_later(wait_s, self._ask_client, wait_s)


def _without_chunks(cycle: RequestResponseCycle) -> Callable[[Any], Awaitable[None]]:
    """Return how to answer HTTP/1.0, which knows no chunks: what has no length ends with the connection."""
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
    """Say whether the peer has reset the connection; no loop tells it while nothing is read."""
    with suppress(OSError):
        state: int = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        return state == _TCP_CLOSE
    return False


class HTTPServer(uvicorn.Server):
    """Drains at the first signal and stops at the second."""

    def __init__(
        self, config: uvicorn.Config, connections: Connections, on_drain: Callable[[], None] | None
    ) -> None:
        super().__init__(config)
        self._connections = connections
        self._on_drain = on_drain

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        if sys.platform == "win32":  # whose loop watches no sockets
            await super().startup(sockets)
            return
        config = self.config
        self._connections.most = fit_to_files(self._connections.most)
        if sockets is None:
            family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
            address = (config.host, config.port)
            sockets = [socket.create_server(address, family=family, backlog=config.backlog)]

        def make_protocol() -> asyncio.Protocol:
            protocol: asyncio.Protocol = config.http_protocol_class(  # type: ignore[call-arg]
                config=config, server_state=self.server_state, app_state=self.lifespan.state
            )
            return protocol

        listeners: list[Any] = [Listener(one, make_protocol, self._connections) for one in sockets]
        self.servers = listeners
        self.started = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take a signal."""
        if self.should_exit:
            self.force_exit = True
        self.drain()

    def drain(self) -> None:
        """Take no more requests, let those that run end within the shutdown timeout, then stop."""
        self._admission.start_draining()
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let requests end; those that take too long end with an error that says so."""
        timeout_s = self.config.timeout_graceful_shutdown or 0
        admission = self._admission
        if admission.num_live and self._on_drain is not None:
            self._on_drain()
        timer = asyncio.get_running_loop().call_later(timeout_s - _LAST_WORDS_S, admission.stop_all)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
        admission.stop_all()  # of whom a second signal found some
        with suppress(TimeoutError):
            await asyncio.wait_for(admission.wait_idle(), _LAST_WORDS_S)

    @property
    def _admission(self) -> Admission:
        admission: Admission = self.config.app.state.admission  # type: ignore[union-attr]
        return admission


def make_server(
    app: FastAPI, settings: ServerConfig, *, on_drain: Callable[[], None] | None = None, **options: Any
) -> HTTPServer:
    """Make the server; `serve()` runs it on the loop that is running, `run()` on one of its own.

    `on_drain` is called when a signal ends it while requests are live.
    """
    connections = Connections(settings.max_connections, settings.max_connections_per_peer)
    config: dict[str, Any] = {
        "host": settings.host,
        "port": settings.port,
        "http": partial(BoundedHTTP, connections=connections),
        "ws": "none",
        "proxy_headers": False,  # else whoever is near could say that he is on this machine
        "server_header": False,
        "access_log": False,
        "log_config": None,
        "log_level": "error",  # anybody can cause the warnings
        "lifespan": "off",
        "timeout_graceful_shutdown": round(settings.shutdown_timeout + _LAST_WORDS_S),
    }
    return HTTPServer(uvicorn.Config(app, **(config | options)), connections, on_drain)
