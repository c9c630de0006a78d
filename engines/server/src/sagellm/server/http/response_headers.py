"""The headers of every answer: the request's id, and those that the inner layers add."""

from __future__ import annotations

import re
import uuid
from typing import TYPE_CHECKING

from sagellm.server.http.errors import as_api_error
from sagellm.server.http.reply import send_error

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:~+/=@-]{1,128}")


class ResponseHeaders:
    """ASGI middleware around all others.

    Leaves the request's own id in `scope["state"]["id"]`, and in `scope["state"]["headers"]` a list to
    which the layers inside add headers until the answer begins. The id that a client sends as
    X-Request-Id is returned if it is safe in headers and logs, otherwise the server's own id. Errors that no
    inner layer handles are answered here, so every response has these headers.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application with a `send` that adds the headers."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        own = uuid.uuid4().hex
        request_id = _given_id(scope) or own.encode()
        headers = [(b"x-request-id", request_id)]
        state = scope.setdefault("state", {})
        state.update(id=own, request_id=request_id.decode(), headers=headers)
        has_started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                message["headers"] = [*message.get("headers", ()), *headers]
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except Exception as error:
            if has_started:
                raise
            await send_error(send_with_headers, as_api_error(error))


def _given_id(scope: Scope) -> bytes | None:
    given = [value for name, value in scope["headers"] if name == b"x-request-id"]
    return given[0] if len(given) == 1 and _REQUEST_ID.fullmatch(given[0]) else None
