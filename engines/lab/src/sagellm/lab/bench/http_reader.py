"""Reads one HTTP/1.1 response from pieces of bytes, however they are split."""

from __future__ import annotations

from sagellm.lab.bench.records import RequestFailedError

_MAX_HEAD_BYTES = 65_536
_MAX_LINE_BYTES = 256


class ResponseReader:
    """Takes bytes and returns body bytes: chunked, of a stated length, or until the connection ends."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.is_done = False
        self._buffer = bytearray()
        self._is_chunked = False
        self._left: int | None = None  # bytes of the body, or of this chunk; None until the end
        self._is_trailer = False
        self._is_kept_by_default = True

    @property
    def may_be_reused(self) -> bool:
        """Whether the connection can carry another request."""
        is_framed = self._is_chunked or self._left is not None
        said = self.headers.get("connection", "").lower()
        is_kept = said == "keep-alive" or (self._is_kept_by_default and said != "close")
        return self.is_done and is_framed and is_kept

    def feed(self, data: bytes) -> bytes:
        """Return the bytes of the body in `data`. Raises RequestFailedError for malformed HTTP."""
        self._buffer += data
        if not self.status and not self._read_head():
            return b""
        if self._is_chunked:
            return self._read_chunks()
        taken = bytes(self._buffer if self._left is None else self._buffer[: self._left])
        del self._buffer[: len(taken)]
        if self._left is not None:
            self._left -= len(taken)
            self.is_done = self._left == 0
        return taken

    def end(self) -> None:
        """Record that the connection ended. Raises RequestFailedError if that was too early."""
        if self.status and not self._is_chunked and self._left is None:
            self.is_done = True
        if not self.is_done:
            raise RequestFailedError("cut", "the connection ended in the middle of the answer")

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > _MAX_HEAD_BYTES or not b"HTTP/1.".startswith(self._buffer[:7]):
                raise RequestFailedError("bad_response", f"no HTTP/1.1: {bytes(self._buffer[:40])!r}")
            return False
        first, *lines = bytes(self._buffer[:end]).decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        words = first.split(" ", 2)
        if len(words) < 2 or not first.startswith("HTTP/1.") or not words[1].isdigit():
            raise RequestFailedError("bad_response", f"no HTTP/1.1: {first[:40]!r}")
        if int(words[1]) < 200:  # 100 Continue and the like come before the response
            return self._read_head()
        self.status = int(words[1])
        self._is_kept_by_default = words[0] != "HTTP/1.0"
        pairs = (line.partition(":") for line in lines)
        self.headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        self._is_chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        length = self.headers.get("content-length", "")
        self._left = 0 if self._is_chunked else int(length) if length.isdigit() else None
        return True

    def _read_chunks(self) -> bytes:
        parts = []
        while not self.is_done:
            if self._left:
                part = bytes(self._buffer[: self._left])
                del self._buffer[: len(part)]
                self._left -= len(part)
                parts.append(part)
                if self._left:
                    break
            line = self._take_line()
            if line is None:
                break
            if self._is_trailer:
                self.is_done = not line
            elif line:  # an empty one ends the previous chunk
                self._left = _chunk_size(line)
                self._is_trailer = self._left == 0
        return b"".join(parts)

    def _take_line(self) -> bytes | None:
        end = self._buffer.find(b"\r\n")
        if end < 0:
            if len(self._buffer) > _MAX_HEAD_BYTES:
                raise RequestFailedError("bad_response", "a chunk of the answer has no size")
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        return line


def _chunk_size(line: bytes) -> int:
    try:
        return int(line[:_MAX_LINE_BYTES].partition(b";")[0], 16)
    except ValueError:
        raise RequestFailedError("bad_response", f"a chunk's size is {line[:40]!r}") from None
