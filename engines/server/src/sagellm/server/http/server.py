"""The HTTP server around the application: its sockets, signals and shutdown."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette

from sagellm.engines.config.sections import ServerConfig
from sagellm.server.http.admission import Admission
from sagellm.server.http.connections import Connections, fit_to_files
from sagellm.server.http.http_protocol import BoundedHTTP
from sagellm.server.http.listener import Listener

_LAST_WORDS_S = 2.0
"""How long requests have to end with an error after the drain timeout."""
_TICK_S = 0.1


class HTTPServer(uvicorn.Server):
    """Drains at the first signal and stops at the second."""

    def __init__(
        self, config: uvicorn.Config, connections: Connections, on_drain: Callable[[], None] | None
    ) -> None:
        super().__init__(config)
        self._connections = connections
        self._on_drain = on_drain

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on the given sockets, or on the configured address."""
        config = self.config
        self._connections.max_open = fit_to_files(self._connections.max_open)
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
        """Drain at the first signal; stop at once at the second."""
        if self.should_exit:
            self.force_exit = True
        self.drain()

    def drain(self) -> None:
        """Refuse new requests, let running ones end within the shutdown timeout, then stop."""
        self._admission.start_draining()
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let requests finish; those that exceed the timeout, or whose engine hangs, end with an error."""
        timeout_s = self.config.timeout_graceful_shutdown or 0
        admission = self._admission
        if admission.num_live and self._on_drain is not None:
            self._on_drain()
        ending = asyncio.create_task(self._stop_all(timeout_s - _LAST_WORDS_S))
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()
        admission.stop_all()  # after a second signal some are still running
        with suppress(TimeoutError):
            await asyncio.wait_for(admission.wait_idle(), _LAST_WORDS_S)
        if (spans := self.config.app.state.spans) is not None:  # type: ignore[union-attr]
            spans.close()

    async def _stop_all(self, timeout_s: float) -> None:
        """End every request after a time, or as soon as the engine makes no progress: it answers nobody."""
        front = self.config.app.state.service.front  # type: ignore[union-attr]
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while front.is_responsive and asyncio.get_running_loop().time() < deadline_s:
            await asyncio.sleep(_TICK_S)
        self._admission.stop_all()

    @property
    def _admission(self) -> Admission:
        admission: Admission = self.config.app.state.admission  # type: ignore[union-attr]
        return admission


def make_server(
    app: Starlette, settings: ServerConfig, *, on_drain: Callable[[], None] | None = None, **options: Any
) -> HTTPServer:
    """Make the server; `serve()` runs it on the current event loop, `run()` on its own.

    `on_drain` is called if a signal arrives while requests are live.
    """
    connections = Connections(settings.max_connections, settings.max_connections_per_peer)
    config: dict[str, Any] = {
        "host": settings.host,
        "port": settings.port,
        "http": partial(BoundedHTTP, connections=connections, is_logged=settings.access_log),
        "ws": "none",
        "proxy_headers": False,  # clients could spoof loopback
        "server_header": False,
        "access_log": False,
        "log_config": None,
        "log_level": "error",  # any client could cause warnings
        "lifespan": "off",
        "timeout_graceful_shutdown": round(settings.shutdown_timeout + _LAST_WORDS_S),
    }
    return HTTPServer(uvicorn.Config(app, **(config | options)), connections, on_drain)
