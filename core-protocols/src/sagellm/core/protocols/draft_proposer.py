"""Guesses at how sequences continue, which a step then verifies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sagellm.core.namespace import Namespace
from sagellm.core.protocols.step import Runs, Seat

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class DraftProposerMetrics:
    """What a proposer was told and asked. What became of its drafts is counted by the engine."""

    num_sequences: int = 0  # that it has been told of
    num_asked: int = 0  # rows for which a draft was wanted
    num_drafts: int = 0  # of them, those that got one
    num_proposed: int = 0  # tokens of these
    num_kept_tokens: int = 0  # that it holds now, of sequences in seats and of earlier ones


class DraftProposerProtocol(ABC):
    """Guesses the next tokens of sequences; a guess costs time and never changes an output.

    Providers are called as `factory()`, once an engine, and called by one thread. A sequence is known by its
    seat: `arrived` comes first, when a draft for it is wanted for the first time, then `extended` and
    `propose`, and `departed` at the end or before a preempted one arrives again. It is told tokens of the
    output only, in order and each once, never one that a later step could take back.

    All calls are on the path of a step: those for a batch take a few microseconds a row, and none blocks. A
    proposer that raises, is slow or breaks a rule is not asked again, and the engine goes on without drafts.
    """

    @abstractmethod
    def arrived(self, seat: Seat, token_ids: Ints, num_prompt: int, namespace: Namespace) -> None:
        """Take in a sequence: its tokens (tokens,), the first `num_prompt` of which are the prompt.

        What one namespace holds must not show in a draft for another. The array must not be kept.
        """

    @abstractmethod
    def extended(self, seats: Ints, tokens: Runs) -> None:
        """Append to sequences: a run of tokens for each of `seats` (rows,), none of them empty."""

    @abstractmethod
    def departed(self, seat: Seat, *, is_over: bool) -> None:
        """Forget a sequence; without effect for a seat that did not arrive.

        Only if `is_over`, its answer is complete: else it was preempted, and may arrive again, or aborted.
        """

    @abstractmethod
    def propose(self, seats: Ints, most: Ints) -> Runs:
        """Return a draft for each of `seats` (rows,), of at most `most` (rows,) tokens; 0 says no guess.

        The same question has the same answer until something else is told.
        """

    @abstractmethod
    def metrics(self) -> DraftProposerMetrics:
        """Return the counts so far. A subclass may add fields."""


class NullDraftProposer(DraftProposerProtocol):
    """Has no guess."""

    def __init__(self, **_: object) -> None:
        self._num_sequences = self._num_asked = 0

    def arrived(self, seat: Seat, token_ids: Ints, num_prompt: int, namespace: Namespace) -> None:
        """Count it."""
        self._num_sequences += 1

    def extended(self, seats: Ints, tokens: Runs) -> None:
        """Learn nothing."""

    def departed(self, seat: Seat, *, is_over: bool) -> None:
        """Forget nothing."""

    def propose(self, seats: Ints, most: Ints) -> Runs:
        """Return no draft."""
        self._num_asked += len(seats)
        return Runs(seats[:0], most * 0)

    def metrics(self) -> DraftProposerMetrics:
        """Return what was told and asked."""
        return DraftProposerMetrics(num_sequences=self._num_sequences, num_asked=self._num_asked)
