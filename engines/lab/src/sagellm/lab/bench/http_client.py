"""A small HTTP/1.1 client on asyncio: one protocol object per connection, no task per piece.

General-purpose clients spend some 100 µs on each piece of a stream; on a machine that also runs the server,
that would dominate. Here a piece costs a few microseconds, and its time is taken first.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

from sagellm.core import ConfigError
from sagellm.lab.bench.http_reader import ResponseReader
from sagellm.lab.bench.records import RequestFailedError, now_ns

REUSE_WITHIN_S = 1.0  # servers close idle connections after some seconds; avoid racing with that

OnBody = Callable[[ResponseReader, bytes, int], None]
"""Called with the response so far, the new bytes of its body, and when they arrived in nanoseconds."""


class _Connection(asyncio.Protocol):
    """One connection; at most one request at a time."""

    def __init__(self) -> None:
        self.idle_since_ns = 0
        self._transport: asyncio.Transport | None = None
        self._reader = ResponseReader()
        self._on_body: OnBody | None = None
        self._answer: asyncio.Future[ResponseReader] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def exchange(self, request: bytes, on_body: OnBody) -> ResponseReader:
        if self._transport is None or self._transport.is_closing():
            raise RequestFailedError("connect", "the connection was closed at once")
        self._reader, self._on_body = ResponseReader(), on_body
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    def data_received(self, data: bytes) -> None:
        arrived_ns = now_ns()
        if self._answer is None or self._answer.done() or self._on_body is None:
            self.close()  # unsolicited data
            return
        try:
            body = self._reader.feed(data)
            if body:
                self._on_body(self._reader, body, arrived_ns)
        except Exception as error:
            self._answer.set_exception(error)
            self.close()
            return
        if self._reader.is_done:
            self.idle_since_ns = arrived_ns
            self._answer.set_result(self._reader)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is None or self._answer.done():
            return
        try:
            self._reader.end()
        except RequestFailedError as error:
            if exc is not None:
                error = RequestFailedError("cut", f"{error}: {exc}")
            self._answer.set_exception(error)
        else:
            self._answer.set_result(self._reader)


class HTTPClient:
    """Sends requests to one server, over connections that are kept for the next request."""

    def __init__(self, base_url: str, *, api_key: str | None = None) -> None:
        parts = urlsplit(base_url if "://" in base_url else f"http://{base_url}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise ConfigError(f"base_url is {base_url!r}; it must look like http://127.0.0.1:8000/v1")
        self._host = parts.hostname
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/") or "/v1"
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        if any(ord(one) < 32 or ord(one) > 126 for one in (api_key or "") + parts.netloc + self._path):
            raise ConfigError("the API key or base_url holds characters that HTTP does not allow")
        self._head = f"Host: {parts.netloc.rpartition('@')[2]}\r\n{key}Accept: */*\r\n"
        self._idle: list[_Connection] = []
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{self._path}"

    async def request(self, path: str, on_body: OnBody, *, body: bytes | None = None) -> ResponseReader:
        """Send a GET, or a POST of JSON; return when the answer is complete. Raises RequestFailedError."""
        method = "GET" if body is None else "POST"
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._head}"
        if body is not None:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        connection = self._take_idle() or await self._connect()
        try:
            reader = await connection.exchange(f"{head}\r\n".encode() + (body or b""), on_body)
        except BaseException:
            connection.close()
            raise
        if reader.may_be_reused:
            self._idle.append(connection)
        else:
            connection.close()
        return reader

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()

    def _take_idle(self) -> _Connection | None:
        oldest_ns = now_ns() - int(REUSE_WITHIN_S * 1e9)
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and connection.idle_since_ns > oldest_ns:
                return connection
            connection.close()
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
        except OSError as error:
            raise RequestFailedError("connect", f"no connection to {self.url}: {error}") from error
        return connection
