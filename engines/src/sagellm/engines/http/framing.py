"""Finds where each HTTP/1.1 message of a connection ends, more strictly than the parser.

The parser has no limits: it skips chunk extensions, accepts encodings that nothing decodes, and reads headers
of any length. What passes here is unambiguous, so a proxy in front cannot read it differently (request
smuggling).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum, auto

from sagellm.engines.http.errors import APIError

MAX_HEADER_BYTES = 16 << 10
"""Limit on the request line and headers together, and on the trailers."""
MAX_HEADERS = 100

_HEAD_END = b"\r\n\r\n"
_CHUNK_LINE = re.compile(rb"[0-9A-Fa-f]{1,8}\r\n")
_MAX_CHUNK_LINE = 10


class _State(Enum):
    HEAD = auto()
    HEAD_ENDED = auto()  # until begin_body
    BODY = auto()
    CHUNK_LINE = auto()
    CHUNK = auto()
    TRAILER = auto()


class Framing:
    """Tracks the message boundaries of one connection. Methods raise APIError for data that is refused."""

    def __init__(self) -> None:
        self._state = _State.HEAD
        self._seen = b""  # the last 3 bytes of a head; the partial line of a chunk header or trailer
        self._num_head_bytes = 0
        self._num_left = 0  # bytes left of a body or a chunk

    @property
    def is_between_messages(self) -> bool:
        """Whether no byte of the next message has arrived."""
        return self._state is _State.HEAD and not self._num_head_bytes

    @property
    def has_head(self) -> bool:
        """Whether a head has just ended."""
        return self._state is _State.HEAD_ENDED

    def next_piece(self, data: bytes) -> int:
        """Return how many of the next bytes, at least one, may be passed to the parser.

        A piece ends where a head or a message ends. After a head, call `begin_body` before the next piece,
        unless the parser found no headers because there were only blank lines.
        """
        if self._state is _State.HEAD_ENDED:
            self._begin(_State.HEAD)
        if self._state is _State.HEAD:
            return self._head(data)
        if self._state is _State.BODY:
            size = min(self._num_left, len(data))
            self._num_left -= size
            if not self._num_left:
                self._begin(_State.HEAD)
            return size
        return self._chunks(data)

    def begin_body(self, headers: Sequence[tuple[bytes, bytes]], http_version: str) -> None:
        """Start the body that the parsed headers announce; header names are in lower case."""
        encodings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
        lengths = [value for name, value in headers if name == b"content-length"]
        if not self.has_head:
            raise _bad("The headers do not end with an empty line.")
        if len(headers) > MAX_HEADERS:
            raise _too_many_headers(f"There are {len(headers)} headers; there may be at most {MAX_HEADERS}.")
        if encodings and lengths:
            raise _bad("A request must not have both Content-Length and Transfer-Encoding.")
        if len(lengths) > 1 or not all(length.isdigit() and len(length) < 19 for length in lengths):
            raise _bad("Content-Length must be one number.")
        if encodings and (encodings != [b"chunked"] or http_version != "1.1"):
            raise _bad("The only Transfer-Encoding supported is chunked, once, in HTTP/1.1.")
        self._num_left = int(lengths[0]) if lengths else 0
        if encodings:
            self._begin(_State.CHUNK_LINE)
        else:
            self._begin(_State.BODY if self._num_left else _State.HEAD)

    def _begin(self, state: _State) -> None:
        self._state = state
        self._seen = b""
        self._num_head_bytes = 0

    def _head(self, data: bytes) -> int:
        joined = self._seen + data
        found = joined.find(_HEAD_END)
        size = len(data) if found < 0 else found + len(_HEAD_END) - len(self._seen)
        self._num_head_bytes += size
        if self._num_head_bytes > MAX_HEADER_BYTES:
            raise _too_many_headers(f"The headers are longer than {MAX_HEADER_BYTES} bytes.")
        self._seen = joined[-3:]
        if found >= 0:
            self._state = _State.HEAD_ENDED
        return size

    def _chunks(self, data: bytes) -> int:
        """Return how many of the next bytes belong to a chunked body. The parser checks chunk ends."""
        position = 0
        while position < len(data):
            if self._state is _State.CHUNK:
                size = min(self._num_left, len(data) - position)
                self._num_left -= size
                position += size
                if not self._num_left:
                    self._begin(_State.CHUNK_LINE)
                continue
            end = data.find(b"\n", position) + 1
            line = self._seen + data[position : end or len(data)]
            position = end or len(data)
            if self._state is _State.CHUNK_LINE:
                self._chunk_line(line)
            elif self._trailer(line):
                return position
        return position

    def _chunk_line(self, line: bytes) -> None:
        self._seen = line
        if line.endswith(b"\n"):
            if not _CHUNK_LINE.fullmatch(line):
                raise _bad("A chunk must begin with its size in at most 8 hexadecimal digits, nothing else.")
            size = int(line, 16)
            self._begin(_State.CHUNK if size else _State.TRAILER)
            self._num_left = size + 2
        elif len(line) > _MAX_CHUNK_LINE:
            raise _bad("A chunk must begin with its size in at most 8 hexadecimal digits, nothing else.")

    def _trailer(self, line: bytes) -> bool:
        """Take a line, perhaps incomplete, after the last chunk; say whether it ends the message."""
        self._num_head_bytes += len(line) - len(self._seen)
        if self._num_head_bytes > MAX_HEADER_BYTES:
            raise _too_many_headers(f"The trailers are longer than {MAX_HEADER_BYTES} bytes.")
        self._seen = b"" if line.endswith(b"\n") else line
        if line not in (b"\r\n", b"\n"):
            return False
        self._begin(_State.HEAD)
        return True


def _bad(message: str) -> APIError:
    return APIError(400, message, code="bad_http")


def _too_many_headers(message: str) -> APIError:
    return APIError(431, message, code="headers_too_large")
