"""Answers: whole ones with a status, headers and JSON, and streams of server-sent events."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from sagellm.core.chaos import flaky
from sagellm.server.http.errors import APIError

if TYPE_CHECKING:
    from starlette.types import Send

JSON = b"application/json"
encode_json = msgspec.json.Encoder().encode
_JSON_HEADERS = [(b"content-type", JSON), (b"x-content-type-options", b"nosniff")]
_CHUNK_BYTES = 64 << 10
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
    (b"x-content-type-options", b"nosniff"),
]
_DONE = b"data: [DONE]\n\n"


async def send_error(send: Send, error: APIError) -> None:
    """Answer with an error."""
    await send_bytes(send, error.encoded, status=error.status, headers=error.headers)


@flaky("http.answer")
async def send_bytes(
    send: Send,
    body: bytes,
    *,
    status: int = 200,
    headers: list[tuple[bytes, bytes]] | None = None,
) -> None:
    """Answer with bytes."""
    own = [*_JSON_HEADERS, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": own + (headers or [])})
    await send({"type": "http.response.body", "body": body})


class JSONReply:
    """Sends JSON that comes in parts: a short answer as a whole, a long one in chunks as they fill."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._held = bytearray()
        self._has_started = False

    async def write(self, part: bytes) -> None:
        """Take a part; sends, and so waits for a client that reads slowly, once per chunk."""
        self._held += part
        if len(self._held) >= _CHUNK_BYTES:
            if not self._has_started:
                self._has_started = True
                await self._send({"type": "http.response.start", "status": 200, "headers": _JSON_HEADERS})
            held, self._held = bytes(self._held), bytearray()
            await self._send({"type": "http.response.body", "body": held, "more_body": True})

    async def finish(self) -> None:
        """Send what is left."""
        rest = bytes(self._held)
        if self._has_started:
            await self._send({"type": "http.response.body", "body": rest})
        else:
            await send_bytes(self._send, rest)

    async def fail(self, error: APIError) -> None:
        """Send an error if nothing was sent yet; else the connection is closed amid the answer."""
        if not self._has_started:
            await send_error(self._send, error)


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

    async def finish(self) -> None:
        """Send the end."""
        await self.write(_DONE)
        await self._send({"type": "http.response.body", "body": b""})

    async def fail(self, error: APIError) -> None:
        """Send an error, with its status if nothing was sent yet, else as an event; then the end."""
        if not self._has_started:
            await send_error(self._send, error)
            return
        await self.write(b"data: %b\n\n" % error.encoded)
        await self._send({"type": "http.response.body", "body": b""})
