"""The access log: one line per request, without any content of requests or answers."""

from __future__ import annotations

import logging
import time
from collections.abc import MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

from sagellm.core import get_logger
from sagellm.engines.logging import fields
from sagellm.server.http.access_control import METRICS_PATH, OPEN_PATHS
from sagellm.server.http.errors import APIError, printable

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from sagellm.server.http.metrics import RequestTimer

logger = get_logger("sagellm.access")

_POLLED = OPEN_PATHS | {METRICS_PATH}
_MAX_SHOWN = 100  # characters of a path or an id, which callers choose


class NotedStatus:
    """An ASGI `send` that keeps the status of the answer, 0 until it begins."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0

    async def __call__(self, message: Message) -> None:
        """Pass a message on."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)


class AccessLog:
    """ASGI middleware around all others: refused requests are logged too.

    Method, path without its query, status, the error's code, tokens, seconds, the answer's id. Successful
    probes and scrapes are logged at DEBUG, all else at INFO. Endpoints that generate leave their timers in
    `scope["state"]["timers"]`, and a failure in `scope["state"]["failure"]`. A status in `scope["state"]` was
    sent instead of the application's.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and log it when it has ended."""
        if scope["type"] != "http" or not logger.isEnabledFor(logging.INFO):
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        noted = NotedStatus(send)
        try:
            await self._app(scope, receive, noted)
        finally:
            status = noted.status
            is_polled = scope["path"] in _POLLED and 200 <= status < 300
            level = logging.DEBUG if is_polled else logging.INFO
            seconds = time.perf_counter() - started
            logger.log(
                level,
                "%s",
                access_line(scope, status, seconds),
                extra=fields(**access_fields(scope, status, seconds)),
            )


def log_refused(method: str, path: str, error: APIError, client: tuple[str, int] | None) -> None:
    """Log a request that was refused before it reached the application; "-" stands for unknown values."""
    scope: dict[str, Any] = {"method": method or "-", "path": path or "-", "client": client}
    scope["state"] = {"failure": error.code}
    shown = fields(**access_fields(scope, error.status))
    logger.info("%s", access_line(scope, error.status), extra=shown)


def access_line(scope: MutableMapping[str, Any], status: int, seconds: float | None = None) -> str:
    """Return the line of a request; status 0 stands for a client that left before there was an answer."""
    state = scope.get("state", {})
    timers: Sequence[RequestTimer] = state.get("timers", ())
    status = state.get("status", status)
    parts = [f"{_shown(scope['method'])} {_shown(scope['path'])} {status or 'left'}"]
    if failure := state.get("failure"):  # also of a stream, whose status was already sent
        parts.append(_shown(failure))
    if timers:
        num_prompt, num_cached, num_output = (
            sum(getattr(one, name) for one in timers) for name in ("num_prompt", "num_cached", "num_tokens")
        )
        parts.append(f"{num_prompt} tokens in ({num_cached} cached), {num_output} out")
    if seconds is not None:
        parts.append(f"{seconds:.3f} s")
    if timers:
        parts.append(_shown(timers[0].request_id))
    return ", ".join(parts)


def access_fields(
    scope: MutableMapping[str, Any], status: int, seconds: float | None = None
) -> dict[str, object]:
    """Return what `access_line` says, with tenant and client, under names of their own for a log of JSON.

    `client` is the address that the connection comes from: the proxy's, if there is one.
    A request of many prompts has the tokens of all, and the times of the first.
    """
    state = scope.get("state", {})
    timers: Sequence[RequestTimer] = state.get("timers", ())
    tenant, failure, given = state.get("tenant"), state.get("failure"), state.get("request_id")
    own, client = state.get("id"), scope.get("client")
    found: dict[str, object] = {
        "request_id": own,
        "client_request_id": None if given == own else given,
        "trace_id": state.get("trace_id"),
        "method": _shown(scope["method"]),
        "path": _shown(scope["path"]),
        "status": state.get("status", status) or None,
        "error": None if failure is None else _shown(failure),
        "tenant": None if tenant is None else tenant.name,
        "client": client[0] if client else None,
        "duration_s": None if seconds is None else round(seconds, 6),
    }
    if timers:
        found |= {
            "prompt_tokens": sum(each.num_prompt for each in timers),
            "cached_tokens": sum(each.num_cached for each in timers),
            "output_tokens": sum(each.num_tokens for each in timers),
            **timers[0].seconds(),
        }
    return found


def _shown(text: str) -> str:
    """Return a caller's text, short, and escaped for terminals and for logs that are read by line."""
    return printable(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…")
