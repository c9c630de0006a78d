"""A draft proposer for tests, which asks a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sagellm.core import DraftProposerMetrics, DraftProposerProtocol, Namespace, TokenIds, pack
from sagellm.core.protocols.step import Runs, Seat

Ints = npt.NDArray[np.int32]
Propose = Callable[[Sequence[TokenIds]], Sequence[Sequence[int]]]
"""Returns a draft for each sequence, given all tokens of each; what is too long is cut."""

DRAFTING = {"speculation": "null", "adaptive_speculation": False}
"""Settings of an engine whose proposer `propose_with` replaces."""


class FunctionProposer(DraftProposerProtocol):
    """Keeps the tokens of each seat, and has a function guess."""

    def __init__(self, propose: Propose) -> None:
        self._propose = propose
        self.texts: dict[int, list[int]] = {}
        self.num_asked = 0

    def arrived(self, seat: Seat, token_ids: Ints, num_prompt: int, namespace: Namespace) -> None:
        """Keep its tokens."""
        assert seat not in self.texts, "the last sequence has departed"
        assert 0 < num_prompt <= len(token_ids)
        self.texts[seat] = token_ids.tolist()

    def extended(self, seats: Ints, tokens: Runs) -> None:
        """Append tokens."""
        for seat, run in zip(seats.tolist(), tokens.lists(), strict=True):
            assert run, "a run has a token"
            self.texts[seat] += run

    def departed(self, seat: Seat, *, is_over: bool) -> None:
        """Forget them."""
        del self.texts[seat]

    def propose(self, seats: Ints, most: Ints) -> Runs:
        """Ask the function."""
        self.num_asked += len(seats)
        drafts = self._propose([pack(self.texts[seat]) for seat in seats.tolist()])
        cut = [list(draft)[:number] for draft, number in zip(drafts, most.tolist(), strict=True)]
        ids = [token for draft in cut for token in draft]
        return Runs(np.array(ids, np.int32), np.array([len(draft) for draft in cut], np.int32))

    def metrics(self) -> DraftProposerMetrics:
        """Return how many rows it was asked about."""
        return DraftProposerMetrics(num_asked=self.num_asked)


def propose_with(engine: Any, propose: Propose) -> FunctionProposer:
    """Have an engine made with `DRAFTING` ask a function for drafts."""
    engine.client.core.scheduler.speculation.proposer = made = FunctionProposer(propose)
    return made
