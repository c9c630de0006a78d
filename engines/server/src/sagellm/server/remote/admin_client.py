"""Queries a running engine. Does not import torch, so that admin commands start quickly."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any, ClassVar, Self

import msgspec

from sagellm.core import EngineDeadError, EngineError, EngineMetrics
from sagellm.server.remote.messages import Call, Failed, FrameReader, Hello, Reply, encode
from sagellm.server.remote.operations import read_metrics

_READ_BYTES = 1 << 20


class AdminClient:
    """Runs operations in a core, without requests. Raises EngineDeadError if the core goes away.

    Calls block. `hello` is the core's first message: what it runs.
    """

    kinds: ClassVar[Any] = Hello | Failed | Reply
    """The messages that a core may send to it."""

    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer
        self._reader = FrameReader(self.kinds)
        self._replies: dict[int, Reply] = {}
        self._others: list[Any] = []
        self._num_calls = 0
        self.hello = self._wait_for_hello()

    @classmethod
    def connect(cls, path: Path, *, timeout_s: float | None = None) -> Self:
        """Connect to a core's socket and wait until its model is loaded.

        Raises EngineDeadError if nothing listens, EngineError if the core cannot start or does not answer.
        """
        peer = socket.socket(socket.AF_UNIX)
        peer.settimeout(timeout_s)
        try:
            peer.connect(str(path))
            return cls(peer)
        except OSError as error:
            peer.close()
            raise EngineDeadError(f"no engine answers at {path.name}: {error}") from error
        except BaseException:
            peer.close()
            raise

    def call(self, operation: str, **arguments: Any) -> Any:
        """Run an operation in the core and return its result. Raises EngineError with its message."""
        self._num_calls += 1
        number = self._num_calls
        self._send(Call(number, operation, arguments))
        while number not in self._replies:
            self._read()
        reply = self._replies.pop(number)
        if reply.error is not None:
            raise EngineError(reply.error)
        return reply.result

    def metrics(self) -> EngineMetrics:
        """Return a snapshot of the core."""
        return read_metrics(self.call("metrics"))

    def close(self) -> None:
        """Disconnect; the core ends whatever is still running for this connection."""
        self._peer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait_for_hello(self) -> Hello:
        message = self._receive()[0]
        if isinstance(message, Failed):
            raise EngineError(message.message)
        if not isinstance(message, Hello):
            raise EngineError(f"the engine began with {type(message).__name__}, not with Hello")
        return message

    def _send(self, message: msgspec.Struct) -> None:
        try:
            self._peer.sendall(encode(message))
        except OSError as error:
            raise EngineDeadError(f"the engine is gone: {error}") from error

    def _receive(self) -> list[Any]:
        """Wait for messages that do not answer a call, and return them."""
        while not self._others:
            self._read()
        messages, self._others = self._others, []
        return messages

    def _read(self) -> None:
        try:
            data = self._peer.recv(_READ_BYTES)
        except TimeoutError as error:
            raise EngineError("the engine does not answer in time") from error
        except OSError as error:
            raise EngineDeadError(f"the engine is gone: {error}") from error
        if not data:
            raise EngineDeadError("the engine is gone; send the request again")
        for message in self._reader.feed(data):
            if isinstance(message, Reply):
                self._replies[message.number] = message
            else:
                self._others.append(message)
