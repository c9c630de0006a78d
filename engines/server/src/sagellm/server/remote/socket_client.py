"""The blocking engine client over a socket, for scripts and tests."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from socket import socket

from sagellm.core import FinishReason, SequenceId, TokenOutput
from sagellm.engines.engine_client import BlockingClient
from sagellm.engines.requests.queued_request import QueuedRequest
from sagellm.server.remote.admin_client import AdminClient
from sagellm.server.remote.messages import Abort, Add, FromCore, Step


class SocketClient(AdminClient, BlockingClient):
    """Runs requests in a core in another process. Raises EngineDeadError if the core goes away."""

    kinds = FromCore

    def __init__(self, peer: socket) -> None:
        super().__init__(peer)
        self._steps: deque[Step] = deque()
        self._live: set[SequenceId] = set()

    def add(self, requests: Sequence[QueuedRequest]) -> None:
        """Send the requests."""
        self._send(Add.of(requests))
        self._live.update(each for request in requests for each in request.sequence_ids)

    def abort(self, sequence_ids: Iterable[SequenceId], *, finish_reason: FinishReason = "abort") -> None:
        """End the sequences before the next step."""
        ended = list(sequence_ids)
        if ended:
            self._send(Abort(ended, finish_reason))
            self._live.difference_update(ended)

    def step(self) -> list[TokenOutput]:
        """Wait for the next step that affected a sequence of this client."""
        while not self._steps:
            if not self._live:
                return []
            self._steps += self._receive()
        outputs = self._steps.popleft().outputs
        self._live.difference_update(
            output.sequence_id for output in outputs if output.finish_reason is not None
        )
        return outputs

    def has_unfinished(self) -> bool:
        """Say whether any sequence of this client is unfinished."""
        return bool(self._live or self._steps)
