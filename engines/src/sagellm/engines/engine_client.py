"""How the front reaches the core: in this process, or wherever else it runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from sagellm.core import EngineMetrics, EngineProtocol, FinishReason, SequenceId, TokenOutput
from sagellm.engines.requests.queued_request import QueuedRequest

if TYPE_CHECKING:
    from sagellm.engines.engine_core.core import EngineCore

RESPONSIVE_S = 4.0
"""An engine that makes no progress for longer while it has requests is unhealthy."""


class EngineClient(ABC):
    """Sends requests to one engine; subclasses define how the results of its steps come back."""

    @abstractmethod
    def add(self, requests: Sequence[QueuedRequest]) -> None:
        """Queue the sequences of requests that have the same parameters, at least one."""

    @abstractmethod
    def abort(self, sequence_ids: Iterable[SequenceId], *, finish_reason: FinishReason = "abort") -> None:
        """End sequences early. Unknown ids are skipped."""


class BlockingClient(EngineClient):
    """Waits for the engine's steps."""

    @abstractmethod
    def step(self) -> Sequence[TokenOutput]:
        """Wait for the next step and return its outputs."""

    @abstractmethod
    def has_unfinished(self) -> bool:
        """Say whether a sequence waits or runs."""

    def use_idle_time(self) -> bool:
        """Have the core prepare for later steps, and say whether more is left.

        A served core does so by itself.
        """
        return False

    @abstractmethod
    def metrics(self) -> EngineMetrics:
        """Return a snapshot of the core."""

    @abstractmethod
    def close(self) -> None:
        """Release the core, which must not be used afterwards."""


class InProcessClient(BlockingClient):
    """Calls an engine of any kind in this process; the engine does nothing between steps."""

    def __init__(self, core: EngineProtocol) -> None:
        self.core = core

    @property
    def own_core(self) -> EngineCore | None:
        """The core, if it is of the kind that this package brings."""
        from sagellm.engines.engine_core.core import EngineCore

        return self.core if isinstance(self.core, EngineCore) else None

    def add(self, requests: Sequence[QueuedRequest]) -> None:
        """Add the sequences to the engine."""
        for request in requests:
            for sequence in request.sequences:
                self.core.add(sequence)

    def abort(self, sequence_ids: Iterable[SequenceId], *, finish_reason: FinishReason = "abort") -> None:
        """End the sequences at once."""
        self.core.abort(sequence_ids, finish_reason=finish_reason)

    def step(self) -> Sequence[TokenOutput]:
        """Run one step."""
        return self.core.step()

    def has_unfinished(self) -> bool:
        """Ask the core."""
        return self.core.has_unfinished()

    def use_idle_time(self) -> bool:
        """Call the core."""
        return self.core.use_idle_time()

    def metrics(self) -> EngineMetrics:
        """Ask the core."""
        return self.core.metrics()

    def close(self) -> None:
        """End the core."""
        self.core.close()
