"""Reads a request's body within limits of size, time, type and depth, before anything parses it."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from sagellm.engines.server.errors import APIError
from sagellm.engines.server.reply import send_error

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

MAX_BODY_BYTES = 8 << 20
MAX_DEPTH = 64
MAX_CONTAINERS = 100_000  # each costs a hundred times its bytes to read
MAX_HELD_BYTES = 256 << 20
"""Of all bodies that are being read."""
LONG_BODY_BYTES = 64 << 10
"""What is longer is read on another thread, so that the others' tokens go on."""

# Strings are skipped whole, and possessively: each byte is looked at once, whatever it is.
_BRACKETS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{}]', re.DOTALL)
_WITH_BODY = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_STEPS = {b"[": 1, b"{": 1, b"]": -1, b"}": -1}


class HeldBody:
    """A body that has been read, or as much of it as has come. It counts until somebody takes it."""

    def __init__(self, gate: BodyGate) -> None:
        self._gate = gate
        self._parts: list[bytes] = []
        self._size = 0

    def append(self, part: bytes) -> None:
        """Hold more. Raises APIError, 413 for too long a body and 429 for too many."""
        self._parts.append(part)
        self._size += len(part)
        self._gate.num_held_bytes += len(part)
        if self._size > MAX_BODY_BYTES:
            raise _too_large()
        if self._gate.num_held_bytes > MAX_HELD_BYTES:
            raise APIError(429, "too many bodies at once; try again later", code="queue_full")

    def take(self) -> bytes:
        """Return the body and hold it no longer; the next time there is none."""
        body = b"".join(self._parts)
        self._gate.num_held_bytes -= self._size
        self._parts, self._size = [], 0
        return body

    async def check_nesting(self) -> None:
        """Raise APIError if there are too many lists and objects, within or beside each other."""
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts = [body]
        if len(body) > LONG_BODY_BYTES:
            fault = await asyncio.to_thread(nesting_fault, body)
        else:
            fault = nesting_fault(body)
        if fault is not None:
            raise APIError(400, fault, code="too_deep")


class BodyGate:
    """ASGI middleware that leaves the body of a POST in `scope["state"]["body"]`, or answers itself."""

    def __init__(self, app: ASGIApp, *, timeout_s: float) -> None:
        self._app = app
        self._timeout_s = timeout_s
        self.num_held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body and go on, or answer 408, 413, 415, 429 or 400."""
        if scope["type"] != "http" or scope["method"] not in _WITH_BODY:
            await self._app(scope, receive, send)
            return
        body = scope["state"]["body"] = HeldBody(self)
        try:
            _check_headers(scope)
            if not await self._read(receive, body):
                return  # the client is gone
            await body.check_nesting()
            await self._app(scope, receive, send)
        except APIError as error:
            await send_error(send, error)
        finally:
            body.take()

    async def _read(self, receive: Receive, body: HeldBody) -> bool:
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return False
                    body.append(message.get("body", b""))
                    if not message.get("more_body", False):
                        return True
        except TimeoutError:
            message_text = f"the body did not arrive within {self._timeout_s:g} s"
            raise APIError(408, message_text, code="body_timeout") from None


def _check_headers(scope: Scope) -> None:
    headers = dict(scope["headers"])
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind != b"application/json":
        raise APIError(415, "send the body as application/json", code="unsupported_media_type")
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise APIError(415, "compressed bodies are not read", code="unsupported_media_type")
    length = headers.get(b"content-length", b"")
    if length.isdigit() and (len(length) > 18 or int(length) > MAX_BODY_BYTES):
        raise _too_large()


def _too_large() -> APIError:
    return APIError(413, f"the body may have at most {MAX_BODY_BYTES} bytes", code="body_too_large")


def nesting_fault(body: bytes) -> str | None:
    """Say what is wrong with the lists and objects of JSON, if anything is. Linear in its length."""
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return None
    depth = num_opened = 0
    for found in _BRACKETS.finditer(body):
        step = _STEPS.get(found[0], 0)
        depth += step
        num_opened += step > 0
        if depth > MAX_DEPTH:
            return f"the body is nested deeper than {MAX_DEPTH} levels"
        if num_opened > MAX_CONTAINERS:
            return f"the body has more than {MAX_CONTAINERS} lists and objects"
    return None
