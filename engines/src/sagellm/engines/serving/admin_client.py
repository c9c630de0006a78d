"""Asks a running engine how it is. Imports no torch, so that admin commands start at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Self

from sagellm.core import EngineMetrics
from sagellm.engines.serving.calls import Failed, Hello, Reply
from sagellm.engines.serving.connection import Connection
from sagellm.engines.serving.operations import read_metrics


class AdminClient:
    """Runs operations in a core; it has no requests. A core that goes away raises EngineDeadError."""

    kinds: ClassVar[Any] = Hello | Failed | Reply
    """The messages that a core may send to it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @classmethod
    def connect(cls, path: Path, *, timeout_s: float | None = None) -> Self:
        """Connect to a core's socket and wait until its model is loaded.

        Raises EngineDeadError if nobody listens, EngineError if the core cannot start or does not answer.
        """
        return cls(Connection.open(path, cls.kinds, timeout_s=timeout_s))

    @property
    def hello(self) -> Hello:
        """What the core runs."""
        return self._connection.hello

    def call(self, operation: str, **arguments: Any) -> Any:
        """Run an operation in the core and return its result. Raises EngineError with its message."""
        return self._connection.call(operation, arguments)

    def metrics(self) -> EngineMetrics:
        """Return a snapshot of the core."""
        return read_metrics(self.call("metrics"))

    def close(self) -> None:
        """Hang up."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
