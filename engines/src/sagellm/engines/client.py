"""How the front reaches the core: in this process, or wherever else it runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence as Seq

from sagellm.core import EngineMetrics, EngineProtocol, FinishReason, SequenceId, TokenOutput
from sagellm.engines.core.sequence import Sequence


class EngineClient(ABC):
    """Sends sequences to one engine and brings back what its steps did."""

    @abstractmethod
    def add(self, sequences: Seq[Sequence]) -> None:
        """Queue sequences that have passed all checks."""

    @abstractmethod
    def abort(self, sequence_ids: Iterable[SequenceId], *, finish_reason: FinishReason = "abort") -> None:
        """End sequences before their time. Unknown ids are passed over."""

    @abstractmethod
    def step(self) -> list[TokenOutput]:
        """Return what the next step did, having waited for it."""

    @abstractmethod
    def has_unfinished(self) -> bool:
        """Say whether a sequence waits or runs."""

    @abstractmethod
    def metrics(self) -> EngineMetrics:
        """Return a snapshot of the core."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the core; nothing is asked of it any more."""


class InProcessClient(EngineClient):
    """Calls an engine of any kind in this process; the engine does nothing between steps."""

    def __init__(self, core: EngineProtocol) -> None:
        self.core = core

    def add(self, sequences: Seq[Sequence]) -> None:
        """Hand the sequences over."""
        for sequence in sequences:
            self.core.add(sequence)

    def abort(self, sequence_ids: Iterable[SequenceId], *, finish_reason: FinishReason = "abort") -> None:
        """End the sequences at once."""
        self.core.abort(sequence_ids, finish_reason=finish_reason)

    def step(self) -> list[TokenOutput]:
        """Run one step."""
        return self.core.step()

    def has_unfinished(self) -> bool:
        """Ask the core."""
        return self.core.has_unfinished()

    def metrics(self) -> EngineMetrics:
        """Ask the core."""
        return self.core.metrics()

    def close(self) -> None:
        """End the core."""
        self.core.close()
