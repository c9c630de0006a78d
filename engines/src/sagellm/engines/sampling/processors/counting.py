"""What our processors share: counting, and what a kernel does in their place."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from sagellm.core import LogitsProcessorMetrics, LogitsProcessorProtocol, LogitsRequest, LogitsRow
from sagellm.engines.sampling.draws import Edits, Ints

if TYPE_CHECKING:
    import torch

Longs = npt.NDArray[np.int64]
State = TypeVar("State")


class CountingProcessor(LogitsProcessorProtocol[State]):
    """Counts sequences and rows around `_start` and `_apply`, which mean what the protocol's do."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._metrics = LogitsProcessorMetrics()

    def start(self, request: LogitsRequest) -> State | None:
        """Return the state of a sequence, or None."""
        state = self._start(request)
        self._metrics.num_sequences += state is not None
        return state

    def apply(self, logits: torch.Tensor, rows: Sequence[LogitsRow[State]]) -> None:
        """Change rows in place."""
        self._metrics.num_rows += len(rows)
        self._apply(logits, rows)

    def metrics(self) -> LogitsProcessorMetrics:
        """Return a copy of the counts so far."""
        return replace(self._metrics)

    @abstractmethod
    def _start(self, request: LogitsRequest) -> State | None: ...

    @abstractmethod
    def _apply(self, logits: torch.Tensor, rows: Sequence[LogitsRow[State]]) -> None: ...


class SparseProcessor(CountingProcessor[State]):
    """Changes a few single logits, or forbids all but some, so that a kernel can do it while it draws.

    `edits` and `allowed` together do what `apply` does.
    """

    def edits_at(self, state: State, output_token_ids: Ints) -> Edits | None:
        """Return the changes of a row of logits after this output, and count the row."""
        self._metrics.num_rows += 1
        return self._edits(state, output_token_ids)

    def allowed(self, state: State) -> npt.NDArray[np.uint32] | None:
        """Return the mask of a sequence, as in `TokenMasks`; None: all tokens may be drawn."""
        return None

    def needs_output(self, state: State) -> bool:
        """Say whether the edits depend on the tokens of the output, and not on their number alone."""
        return False

    def _edits(self, state: State, output_token_ids: Ints) -> Edits | None:
        return None


def as_array(token_ids: Collection[int]) -> Longs:
    """Return token ids as an array."""
    return np.fromiter(token_ids, np.int64, len(token_ids))
