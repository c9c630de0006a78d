"""The engine client over a socket, for callers that wait: scripts and tests."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence as Seq
from pathlib import Path
from typing import Any, Self

from sagellm.core import EngineMetrics, FinishReason, SequenceId
from sagellm.engines.client import EngineClient
from sagellm.engines.core.engine_core import TokenOutput
from sagellm.engines.core.sequence import Sequence
from sagellm.engines.serving.connection import Connection
from sagellm.engines.serving.conversion import make_requests
from sagellm.engines.serving.messages import Abort, Add, FromCore, Hello, Step
from sagellm.engines.serving.operations import read_metrics


class SocketClient(EngineClient):
    """Speaks with a core in another process. A core that goes away raises EngineDeadError."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._steps: deque[Step] = deque()
        self._live: set[SequenceId] = set()

    @classmethod
    def connect(cls, path: Path, *, timeout_s: float | None = None) -> Self:
        """Connect to a core's socket and wait until its model is loaded.

        Raises EngineDeadError if nobody listens, EngineError if the core cannot start.
        """
        return cls(Connection.open(path, FromCore, timeout_s=timeout_s))

    @property
    def hello(self) -> Hello:
        """What the core runs."""
        return self._connection.hello

    def add(self, sequences: Seq[Sequence]) -> None:
        """Send the sequences; those of one request side by side."""
        self._connection.send(Add(make_requests(sequences)))
        self._live.update(sequence.sequence_id for sequence in sequences)

    def abort(self, sequence_ids: Iterable[SequenceId], *, finish_reason: FinishReason = "abort") -> None:
        """End the sequences before the next step."""
        ended = list(sequence_ids)
        if ended:
            self._connection.send(Abort(ended, finish_reason))
            self._live.difference_update(ended)

    def step(self) -> list[TokenOutput]:
        """Wait for the next step that did something to a sequence of this client."""
        while not self._steps:
            if not self._live:
                return []
            self._steps += self._connection.receive()
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
        return self._connection.call(operation, arguments)

    def close(self) -> None:
        """Hang up; the core ends what is still running for this client."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
