"""Answers as server-sent events: an answer begins with its first event, and never ends silently."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sagellm.core.chaos import flaky
from sagellm.engines.server.errors import APIError
from sagellm.engines.server.reply import send_error

if TYPE_CHECKING:
    from starlette.types import Send

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
    (b"x-content-type-options", b"nosniff"),
]
_DONE = b"data: [DONE]\n\n"


class EventReply:
    """Sends events as they are, without a task or a timer for each."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._has_started = False

    @flaky("http.events")
    async def write(self, events: bytes) -> None:
        """Send complete events, each with its blank line."""
        if not self._has_started:
            self._has_started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def finish(self, events: bytes = b"") -> None:
        """Send the last events and the end."""
        await self.write(events + _DONE)
        await self._send({"type": "http.response.body", "body": b""})

    async def fail(self, error: APIError) -> None:
        """Send an error, with its status if nothing was sent yet, else as an event; then the end."""
        if not self._has_started:
            await send_error(self._send, error)
            return
        await self.write(b"data: %b\n\n" % error.encoded)
        await self._send({"type": "http.response.body", "body": b""})
