"""The server around the application: its socket, its signals, the limits that HTTP itself needs."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sagellm.engines.config.sections import ServerConfig
from sagellm.engines.server.admission import Admission
from sagellm.engines.server.errors import APIError

MAX_HEADER_BYTES = 64 << 10
_HEADER_TIMEOUT_S = 10.0
_STALL_TIMEOUT_S = 60.0
_LAST_WORDS_S = 2.0
"""How long a client may leave a full buffer unread before it counts as gone."""


class BoundedHTTP(HttpToolsProtocol):
    """HTTP/1.1 with an end to headers, trailers and waiting for who does not read."""

    _stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for headers."""
        super().connection_made(transport)
        self._num_other_bytes = 0  # that are no body
        self._num_header_bytes = 0
        self._is_in_headers = True
        self._is_refused = False
        self._deadline = self.loop.call_later(_HEADER_TIMEOUT_S, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._deadline.cancel()
        self._end_stall()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Begin to wait for a client that reads slowly."""
        super().pause_writing()
        if self._stall is None:
            self._stall = self.loop.call_later(_STALL_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop waiting: it reads."""
        self._end_stall()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """Read on, unless there is too much beside bodies."""
        self._num_other_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._is_refused or self._num_other_bytes > MAX_HEADER_BYTES:
            self.send_400_response("The headers are too long.")
        elif self._is_idle:  # what came belongs to no request that runs; no other timer waits for the rest
            self._wait_for_headers()

    def on_message_begin(self) -> None:
        """Begin to count the headers of a request."""
        super().on_message_begin()
        self._is_in_headers = True
        self._num_header_bytes = 0
        self._wait_for_headers()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; trailers are passed over."""
        if self._is_in_headers:
            self._num_header_bytes += len(name) + len(value)
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Stop counting and waiting."""
        self._is_in_headers = False
        self._deadline.cancel()
        if self._num_header_bytes > MAX_HEADER_BYTES:
            self._is_refused = True
        elif not self._is_refused:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a piece of a body; one byte may come with seven of its chunk's frame."""
        self._num_other_bytes = max(0, self._num_other_bytes - 8 * len(body))
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Begin anew."""
        self._num_other_bytes = 0
        if not self._is_refused:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP; into an answer that is being written nothing is mixed."""
        if not self._is_idle and self.cycle.response_started:
            self.transport.abort()
            return
        body = APIError(400, msg, code="bad_http").encoded
        head = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Type: application/json\r\n"
        self.transport.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        self.transport.close()

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _wait_for_headers(self) -> None:
        self._deadline.cancel()
        self._deadline = self.loop.call_later(_HEADER_TIMEOUT_S, self._give_up)

    def _end_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _give_up(self) -> None:
        if not self._is_idle:  # the beginning of a next request waits for the answer to this one
            self._wait_for_headers()
        elif not self.transport.is_closing():
            self.transport.close()


class HTTPServer(uvicorn.Server):
    """Drains at the first signal and stops at the second."""

    def __init__(self, config: uvicorn.Config, on_drain: Callable[[], None] | None) -> None:
        super().__init__(config)
        self._on_drain = on_drain

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
    config: dict[str, Any] = {
        "host": settings.host,
        "port": settings.port,
        "http": BoundedHTTP,
        "ws": "none",
        "proxy_headers": False,  # else whoever is near could say that he is on this machine
        "server_header": False,
        "access_log": False,
        "log_config": None,
        "log_level": "error",  # anybody can cause the warnings
        "lifespan": "off",
        "timeout_graceful_shutdown": round(settings.shutdown_timeout + _LAST_WORDS_S),
    }
    return HTTPServer(uvicorn.Config(app, **(config | options)), on_drain)
