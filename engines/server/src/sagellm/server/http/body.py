"""Reads a request's body within limits of size, time, type and depth, before anything parses it."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Collection
from itertools import islice
from typing import TYPE_CHECKING

from sagellm.server.http.errors import APIError
from sagellm.server.http.reply import send_error

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

MAX_BODY_BYTES = 8 << 20
MAX_DEPTH = 64
MAX_CONTAINERS = 100_000  # each costs a hundred times its bytes to read
MAX_HELD_BYTES = 256 << 20
"""Total for all bodies being read."""
LONG_BODY_BYTES = 64 << 10
"""Longer bodies are parsed on another thread, so that they do not delay other streams."""

MAX_PARAMETERS = 256

# Strings are skipped whole, and possessively: each byte is read exactly once. A match ends after some strings
# even without a bracket, so that other threads can run.
TO_BRACKET = re.compile(rb'(?:[^"\[\]{}]++|"(?:[^"\\]++|\\.)*+"?+){0,4096}+([\[\]{}]?)', re.DOTALL)
BRACKET_STEPS = {b"[": 1, b"{": 1, b"]": -1, b"}": -1}
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?+', re.DOTALL)


class HeldBody:
    """The bytes of a body received so far, counted against the gate's total until released."""

    def __init__(self, gate: BodyGate, tenant: str) -> None:
        self._gate, self._tenant = gate, tenant
        self.data = bytearray()

    def append(self, part: bytes) -> None:
        """Append bytes. Raises APIError: 413 for a body that is too long, 429 for too many bodies."""
        self.data += part
        gate = self._gate
        gate.num_held_bytes += len(part)
        gate.held_bytes_of[self._tenant] += len(part)
        if len(self.data) > MAX_BODY_BYTES:
            raise _too_large()
        free = MAX_HELD_BYTES - gate.num_held_bytes
        if gate.is_shared and gate.held_bytes_of[self._tenant] > max(free, MAX_BODY_BYTES):
            raise APIError(
                429, "too many bodies of this key at once; try again later", code="tenant_queue_full"
            )
        if free < 0:
            raise APIError(429, "too many bodies at once; try again later", code="queue_full")

    def release(self) -> None:
        """Free the bytes. Idempotent."""
        self._gate.num_held_bytes -= len(self.data)
        self._gate.held_bytes_of[self._tenant] -= len(self.data)
        self.data = bytearray()

    async def check_nesting(self) -> None:
        """Raise APIError for nesting that is too deep, or too many lists, objects or parameters."""
        if len(self.data) > LONG_BODY_BYTES:
            fault = await asyncio.to_thread(nesting_fault, self.data)
        else:
            fault = nesting_fault(self.data)
        if fault is not None:
            raise APIError(400, fault, code="too_deep")


class BodyGate:
    """ASGI middleware that leaves the body of a POST in `scope["state"]["body"]`, or answers itself.

    It reads those of `paths` alone; what the routing refuses is told that first.
    If tenants share the server, bodies of one may hold as many bytes as they leave free, at least one body.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        paths: Collection[str],
        timeout_s: float,
        stall_timeout_s: float,
        is_shared: bool = False,
    ) -> None:
        self._app = app
        self._paths = paths
        self._timeout_s = timeout_s
        self._stall_timeout_s = stall_timeout_s
        self.is_shared = is_shared
        self.num_held_bytes = 0
        self.held_bytes_of: Counter[str] = Counter()  # by tenant

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body and go on, or answer 408, 413, 415, 429 or 400."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in self._paths:
            await self._app(scope, receive, send)
            return
        body = scope["state"]["body"] = HeldBody(self, scope["state"]["tenant"].name)
        try:
            _check_headers(scope)
            if not await self._read(receive, body):
                return  # the client is gone
            await body.check_nesting()
            await self._app(scope, receive, send)
        except APIError as error:
            scope["state"].setdefault("failure", error.code)  # for the access log
            await send_error(send, error)
        finally:
            body.release()

    async def _read(self, receive: Receive, body: HeldBody) -> bool:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._timeout_s
        try:
            async with asyncio.timeout_at(end) as limit:
                while True:
                    limit.reschedule(min(end, loop.time() + self._stall_timeout_s))
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return False
                    body.append(message.get("body", b""))
                    if not message.get("more_body", False):
                        return True
        except TimeoutError:
            reason = f"the body did not arrive within {self._timeout_s:g} s"
            if loop.time() < end:
                reason = f"no more of the body arrived within {self._stall_timeout_s:g} s"
            raise APIError(408, reason, code="body_timeout") from None


def _check_headers(scope: Scope) -> None:
    headers = dict(scope["headers"])
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind != b"application/json":
        raise APIError(415, "send the body as application/json", code="unsupported_media_type")
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise APIError(415, "compressed bodies are not supported", code="unsupported_media_type")
    length = headers.get(b"content-length", b"")
    if length.isdigit() and (len(length) > 18 or int(length) > MAX_BODY_BYTES):
        raise _too_large()


def _too_large() -> APIError:
    return APIError(413, f"the body may have at most {MAX_BODY_BYTES} bytes", code="body_too_large")


def nesting_fault(body: bytes | bytearray) -> str | None:
    """Return why a body's lists and objects are refused, or None. Linear in its length."""
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH and body.count(b",") < MAX_PARAMETERS:
        return None
    return object_fault(body, "the body")


def object_fault(body: bytes | bytearray | memoryview, name: str) -> str | None:
    """Return why the parameters, lists and objects in a JSON object are refused, or None."""
    depth = num_opened = num_strings = 0
    for found in TO_BRACKET.finditer(body):
        if depth == 1:  # names, and string values
            num_strings += sum(
                1 for _ in islice(_STRING.finditer(body, *found.span()), 2 * MAX_PARAMETERS + 1)
            )
        step = BRACKET_STEPS.get(found[1], 0)
        depth += step
        num_opened += step > 0
        if depth > MAX_DEPTH:
            return f"{name} is nested deeper than {MAX_DEPTH} levels"
        if num_opened > MAX_CONTAINERS:
            return f"{name} has more than {MAX_CONTAINERS} lists and objects"
        if num_strings > 2 * MAX_PARAMETERS:
            return f"{name} has more than {MAX_PARAMETERS} parameters"
    return None
