"""Complete answers: a status, a few headers, JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from sagellm.core.chaos import flaky
from sagellm.engines.server.errors import APIError

if TYPE_CHECKING:
    from starlette.types import Send

JSON = b"application/json"
encode_json = msgspec.json.Encoder().encode


async def send_json(send: Send, value: Any) -> None:
    """Answer with a value as JSON."""
    await send_bytes(send, encode_json(value))


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
    own = [
        (b"content-type", JSON),
        (b"content-length", b"%d" % len(body)),
        (b"x-content-type-options", b"nosniff"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": own + (headers or [])})
    await send({"type": "http.response.body", "body": body})
