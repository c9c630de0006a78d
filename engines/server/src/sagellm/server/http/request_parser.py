"""Reads the requests of one HTTP/1.1 connection, and refuses what the RFCs let servers read differently.

What passes is unambiguous, so a proxy in front cannot read it otherwise (request smuggling), and bounded. An
offer to change the protocol (`Upgrade`) is ignored, as RFC 9110, section 7.8, allows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

from sagellm.server.http.errors import APIError

MAX_HEADER_BYTES = 16 << 10
"""Limit on the request line and headers together, and on the trailers."""
MAX_HEADERS = 100
MAX_CHUNKS = 1 << 16
"""Limit on the chunks of one body, of which each takes some 4 µs."""

_MAX_LINES = 256
"""Lines that are read in one go: about half a millisecond."""

_END = b"\r\n"
_CONTROL = rb"\x00-\x08\x0a-\x1f\x7f"  # all but a tab
_FORBIDDEN = re.compile(rb"[%b]" % _CONTROL)
_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_REQUEST_LINE = re.compile(rb"(%b) ([\x21-\x7e]+) HTTP/([0-9])\.([0-9])\r\n" % _TOKEN)
_FIELD = re.compile(rb"(%b):([^%b]*)\r\n" % (_TOKEN, _CONTROL))
_HOST = rb"(?:\[[0-9A-Za-z:.%_~-]+\]|[0-9A-Za-z._~!$&'()*+,;=%-]*)(?::[0-9]*)?"
_HOST_VALUE = re.compile(_HOST)
_ABSOLUTE = re.compile(rb"https?://(?=[^:/?])(%b)(/[^?]*)?(\?.*)?" % _HOST, re.IGNORECASE)
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})\r\n")


class RequestHandler(Protocol):
    """What the parser calls, in this order for each request; `on_body` may be called any number of times."""

    def on_message_begin(self) -> None:
        """A request line has arrived."""

    def on_url(self, url: bytes) -> None:
        """Take the path and query of the request, or `*`."""

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, its name in lower case. The host of an absolute request URI is the Host header."""

    def on_headers_complete(self) -> None:
        """The body follows, if there is one."""

    def on_body(self, body: bytes) -> None:
        """Take a part of the body, without its framing."""

    def on_message_complete(self) -> None:
        """The request has arrived."""


class RequestParser:
    """Calls a handler with each request of a connection. `feed_data` raises APIError for what is refused.

    After an error nothing more may be fed. What follows a request that closes the connection is ignored.
    """

    def __init__(self, handler: RequestHandler) -> None:
        self._handler = handler
        self._line = b""  # what has arrived of a line
        self._take_line: Callable[[bytes], None] = self._take_request_line
        self._num_line_bytes = 0  # of the head or the trailers so far
        self._num_left = 0  # bytes left of the body or the chunk
        self._num_chunks = 0
        self._is_chunked = self._has_ended = False
        self._is_last = self._is_over = False
        self._method, self._version = b"", "1.1"
        self._host: bytes | None = None  # of an absolute request URI
        self._headers: list[tuple[bytes, bytes]] = []

    @property
    def is_between_requests(self) -> bool:
        """Whether nothing of the next request has arrived but blank lines."""
        return self._take_line == self._take_request_line and not self._line

    @property
    def is_in_body(self) -> bool:
        """Whether the body of the last request has not come to its end."""
        return self._is_chunked or self._num_left > 0

    def get_method(self) -> bytes:
        """Return the method of the request whose head came last."""
        return self._method

    def get_http_version(self) -> str:
        """Return "1.1" or "1.0". A higher minor version is read as 1.1 (RFC 9110, section 2.5)."""
        return self._version

    def should_keep_alive(self) -> bool:
        """Say whether another request may follow on this connection."""
        return not self._is_last

    def should_upgrade(self) -> bool:
        """Say that the protocol never changes."""
        return False

    def feed_data(self, data: bytes) -> int:
        """Read the next bytes of the connection, however they are split, and return how many.

        Stops at the end of a request, and after `_MAX_LINES` lines, so that nobody else waits for long.
        """
        if self._is_over:
            return len(data)
        position = num_lines = 0
        self._has_ended = False
        while position < len(data) and num_lines < _MAX_LINES and not self._has_ended:
            if self._num_left:
                size = min(self._num_left, len(data) - position)
                self._num_left -= size
                self._handler.on_body(data[position : position + size])
                position += size
                if not self._num_left and not self._is_chunked:
                    self._end_message()
                continue
            end = data.find(b"\n", position) + 1
            piece = data[position : end or len(data)]
            position += len(piece)
            num_lines += 1
            self._num_line_bytes += len(piece)
            if self._num_line_bytes > MAX_HEADER_BYTES:
                raise _too_many_headers(f"The headers or trailers are longer than {MAX_HEADER_BYTES} bytes.")
            if not end:
                self._keep(piece)
            elif self._line:
                line, self._line = self._line + piece, b""
                self._take_line(line)
            else:
                self._take_line(piece)
        if self._has_ended and data.startswith(_END, position):
            position += len(_END)  # some clients send one after a body
        return position

    def _keep(self, piece: bytes) -> None:
        """Keep the next part of a line, unless it is not HTTP, which may have no lines."""
        if _FORBIDDEN.search(piece, 0, len(piece) - 1):  # the last byte may be the CR of its end
            raise _bad("The headers contain a control character.")
        self._line += piece

    def _take_request_line(self, line: bytes) -> None:
        if line == _END:
            return  # RFC 9112, section 2.2: blank lines before a request are ignored
        found = _REQUEST_LINE.fullmatch(line)
        if found is None:
            raise _bad("The request line must be a method, a target and HTTP/1.1, with one space between.")
        self._method, target, major, minor = found.groups()
        if major != b"1":
            raise APIError(505, "This server speaks HTTP/1.1 and HTTP/1.0.", code="http_version")
        self._version = "1.0" if minor == b"0" else "1.1"
        self._host, url = _split_target(self._method, target)
        self._headers = []
        self._handler.on_message_begin()
        self._handler.on_url(url)
        self._take_line = self._take_header

    def _take_header(self, line: bytes) -> None:
        if line != _END:
            self._headers.append(_field(line))
            return
        headers = self._headers
        if len(headers) > MAX_HEADERS:
            raise _too_many_headers(f"There are {len(headers)} headers; there may be at most {MAX_HEADERS}.")
        self._check_host([value for name, value in headers if name == b"host"])
        self._frame_body()
        options = b",".join(value.lower() for name, value in headers if name == b"connection")
        self._is_last = self._version == "1.0" or b"close" in [one.strip() for one in options.split(b",")]
        if self._host is not None:
            headers = [each for each in headers if each[0] != b"host"] + [(b"host", self._host)]
        for name, value in headers:
            self._handler.on_header(name, value)
        self._handler.on_headers_complete()
        self._num_line_bytes = 0
        if self._is_chunked:
            self._take_line = self._take_chunk_size
        elif not self._num_left:
            self._end_message()

    def _check_host(self, hosts: list[bytes]) -> None:
        """Refuse what RFC 9112, section 3.2, says must be refused."""
        if len(hosts) > 1 or (not hosts and self._version == "1.1"):
            raise _bad(f"A request must have one Host header; this one has {len(hosts)}.")
        if hosts and not _HOST_VALUE.fullmatch(hosts[0]):
            raise _bad("The Host header must be a name or an address, and perhaps a port.")

    def _frame_body(self) -> None:
        encodings = [value.lower() for name, value in self._headers if name == b"transfer-encoding"]
        lengths = [value for name, value in self._headers if name == b"content-length"]
        if encodings and lengths:
            raise _bad("A request must not have both Content-Length and Transfer-Encoding.")
        if len(lengths) > 1 or not all(length.isdigit() and len(length) < 19 for length in lengths):
            raise _bad("Content-Length must be one number.")
        if encodings and (encodings != [b"chunked"] or self._version != "1.1"):
            raise _bad("The only Transfer-Encoding supported is chunked, once, in HTTP/1.1.")
        self._num_left = int(lengths[0]) if lengths else 0
        self._is_chunked = bool(encodings)

    def _take_chunk_size(self, line: bytes) -> None:
        found = _CHUNK_SIZE.fullmatch(line)
        if found is None:
            raise _bad("A chunk must begin with its size in at most 8 hexadecimal digits, nothing else.")
        self._num_chunks += 1
        if self._num_chunks > MAX_CHUNKS:
            raise _bad(f"A body may have at most {MAX_CHUNKS} chunks; send larger ones.")
        self._num_left, self._num_line_bytes = int(found[1], 16), 0
        self._take_line = self._take_chunk_end if self._num_left else self._take_trailer

    def _take_chunk_end(self, line: bytes) -> None:
        if line != _END:
            raise _bad("A chunk is longer than its size.")
        self._num_line_bytes = 0
        self._take_line = self._take_chunk_size

    def _take_trailer(self, line: bytes) -> None:
        if line != _END:
            _field(line)  # valid, and ignored
        else:
            self._end_message()

    def _end_message(self) -> None:
        self._is_chunked, self._has_ended = False, True
        self._is_over = self._is_last
        self._num_line_bytes = self._num_chunks = 0
        self._take_line = self._take_request_line
        self._handler.on_message_complete()


def _split_target(method: bytes, target: bytes) -> tuple[bytes | None, bytes]:
    """Return the host in a request target, None if it has none, and the path with the query.

    Source: RFC 9112, section 3.2.
    """
    if method == b"CONNECT":
        raise APIError(501, "This server is not a proxy: CONNECT is not supported.", code="bad_http")
    if b"#" in target:
        raise _bad("The request target must not have a fragment.")
    if target.startswith(b"/") or (target == b"*" and method == b"OPTIONS"):
        return None, target
    found = _ABSOLUTE.fullmatch(target)
    if found is None:
        raise _bad("The request target must be a path, or an http URI with a host and without a user.")
    host, path, query = found.groups()
    if method == b"OPTIONS" and path is None and query is None:
        return host, b"*"
    return host, (path or b"/") + (query or b"")


def _field(line: bytes) -> tuple[bytes, bytes]:
    found = _FIELD.fullmatch(line)
    if found is None:
        raise _bad("A header must be a name, a colon and a value without control characters, on one line.")
    return found[1].lower(), found[2].strip(b" \t")


def _bad(message: str) -> APIError:
    return APIError(400, message, code="bad_http")


def _too_many_headers(message: str) -> APIError:
    return APIError(431, message, code="headers_too_large")
