"""Splits a stream of server-sent events into their data."""

from __future__ import annotations


class EventSplitter:
    """Takes pieces of a stream and gives the data of each event that they complete."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, body: bytes) -> list[bytes]:
        """Return the data of the events that end in `body`; comments and other fields are dropped."""
        *lines, self._rest = (self._rest + body).split(b"\n")
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].strip())
            elif self._data and line in (b"", b"\r"):
                events.append(b"\n".join(self._data))
                self._data.clear()
        return events
