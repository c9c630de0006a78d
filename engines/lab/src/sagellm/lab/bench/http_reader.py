"""Reads one HTTP/1.1 response from pieces of bytes, however they are split."""

from __future__ import annotations

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from sagellm.lab.bench.records import RequestFailedError

_MAX_HEAD_BYTES = 65_536


class ResponseReader:
    """Takes bytes and returns body bytes: chunked, of a stated length, or until the connection ends."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.is_done = False
        self._parser = HttpResponseParser(self)
        self._num_head_bytes = 0
        self._body: list[bytes] = []
        self._is_kept = False

    @property
    def may_be_reused(self) -> bool:
        """Whether the connection can carry another request."""
        return self.is_done and self._is_kept

    def feed(self, data: bytes) -> bytes:
        """Return the bytes of the body in `data`. Raises RequestFailedError for malformed HTTP."""
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            raise RequestFailedError("bad_response", f"no HTTP/1.1 ({error}): {data[:40]!r}") from error
        if not self.status:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > _MAX_HEAD_BYTES:
                raise RequestFailedError("bad_response", f"headers exceed {_MAX_HEAD_BYTES:,} bytes")
        body = b"".join(self._body)
        self._body.clear()
        return body

    def end(self) -> None:
        """Record that the connection ended. Raises RequestFailedError if that was too early."""
        is_framed = "content-length" in self.headers or "transfer-encoding" in self.headers
        if self.status and not is_framed:
            self.is_done = True
        if not self.is_done:
            raise RequestFailedError("cut", "the connection ended in the middle of the answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; the parser calls this and the following."""
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1").strip()

    def on_headers_complete(self) -> None:
        """Take the status, unless it is that of a response before the response, such as 100 Continue."""
        status = self._parser.get_status_code()
        if status >= 200:
            self.status, self._is_kept = status, self._parser.should_keep_alive()
        else:
            self.headers.clear()

    def on_body(self, data: bytes) -> None:
        """Keep a piece of the body."""
        self._body.append(data)

    def on_message_complete(self) -> None:
        """Note the end of the response."""
        self.is_done = self.status != 0
