"""The engine client over a socket, for callers that wait: scripts, tests, admin commands."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterable, Sequence as Seq
from pathlib import Path
from typing import Any, Self

from sagellm.core import EngineDeadError, EngineError, EngineMetrics, FinishReason, SequenceId
from sagellm.engines.client import EngineClient
from sagellm.engines.core.engine_core import TokenOutput
from sagellm.engines.core.sequence import Sequence
from sagellm.engines.serving.conversion import make_requests
from sagellm.engines.serving.messages import (
    Abort,
    Add,
    Call,
    Failed,
    FrameReader,
    FromCore,
    Hello,
    Reply,
    Step,
    ToCore,
    encode,
)
from sagellm.engines.serving.operations import read_metrics

_READ_BYTES = 1 << 20


class SocketClient(EngineClient):
    """Speaks with a core in another process. A core that goes away raises EngineDeadError."""

    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer
        self._reader = FrameReader(FromCore)
        self._steps: deque[Step] = deque()
        self._replies: dict[int, Reply] = {}
        self._live: set[SequenceId] = set()
        self._num_calls = 0
        self.hello = self._wait_for_hello()

    @classmethod
    def connect(cls, path: Path, *, timeout_s: float | None = None) -> Self:
        """Connect to a core's socket and wait until its model is loaded.

        Raises EngineDeadError if nobody listens, EngineError if the core cannot start.
        """
        peer = socket.socket(socket.AF_UNIX)
        peer.settimeout(timeout_s)
        try:
            peer.connect(str(path))
        except OSError as error:
            peer.close()
            raise EngineDeadError(f"no engine answers at {path.name}: {error}") from error
        return cls(peer)

    def add(self, sequences: Seq[Sequence]) -> None:
        """Send the sequences; those of one request side by side."""
        self._send(Add(make_requests(sequences)))
        self._live.update(sequence.sequence_id for sequence in sequences)

    def abort(self, sequence_ids: Iterable[SequenceId], *, finish_reason: FinishReason = "abort") -> None:
        """End the sequences before the next step."""
        ended = list(sequence_ids)
        if ended:
            self._send(Abort(ended, finish_reason))
            self._live.difference_update(ended)

    def step(self) -> list[TokenOutput]:
        """Wait for the next step that did something to a sequence of this client."""
        while not self._steps:
            if not self._live:
                return []
            self._receive()
        outputs = self._steps.popleft().outputs
        self._live.difference_update(
            output.sequence_id for output in outputs if output.finish_reason is not None
        )
        return outputs

    def has_unfinished(self) -> bool:
        """Say whether a sequence of this client goes on."""
        return bool(self._live or self._steps)

    def metrics(self) -> EngineMetrics:
        """Ask the core."""
        return read_metrics(self.call("metrics"))

    def call(self, operation: str, **arguments: Any) -> Any:
        """Run an operation in the core and return its result. Raises EngineError with its message."""
        self._num_calls += 1
        number = self._num_calls
        self._send(Call(number, operation, arguments))
        while number not in self._replies:
            self._receive()
        reply = self._replies.pop(number)
        if reply.error is not None:
            raise EngineError(reply.error)
        return reply.result

    def close(self) -> None:
        """Hang up; the core ends what is still running for this client."""
        self._peer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait_for_hello(self) -> Hello:
        while True:
            for message in self._read():
                if isinstance(message, Failed):
                    raise EngineError(message.message)
                if isinstance(message, Hello):
                    return message

    def _receive(self) -> None:
        for message in self._read():
            match message:
                case Step():
                    self._steps.append(message)
                case Reply():
                    self._replies[message.number] = message

    def _read(self) -> list[FromCore]:
        try:
            data = self._peer.recv(_READ_BYTES)
        except TimeoutError as error:
            raise EngineError("the engine does not answer in time") from error
        except OSError as error:
            raise EngineDeadError(f"the engine is gone: {error}") from error
        if not data:
            raise EngineDeadError("the engine is gone; send the request again")
        return self._reader.feed(data)

    def _send(self, message: ToCore) -> None:
        try:
            self._peer.sendall(encode(message))
        except OSError as error:
            raise EngineDeadError(f"the engine is gone: {error}") from error
