"""The engine client over a socket, for callers that wait: scripts and tests."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence as Seq

from sagellm.core import FinishReason, SequenceId, TokenOutput
from sagellm.engines.client import EngineClient
from sagellm.engines.core.sequence import Sequence
from sagellm.engines.serving.admin_client import AdminClient
from sagellm.engines.serving.connection import Connection
from sagellm.engines.serving.conversion import make_requests
from sagellm.engines.serving.messages import Abort, Add, FromCore, Step


class SocketClient(AdminClient, EngineClient):
    """Runs requests in a core of another process. A core that goes away raises EngineDeadError."""

    kinds = FromCore

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._steps: deque[Step] = deque()
        self._live: set[SequenceId] = set()

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
