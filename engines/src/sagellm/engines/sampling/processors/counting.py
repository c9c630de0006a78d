"""What our processors share: counting, writing single cells, and what a kernel does in their place."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from sagellm.core import LogitsProcessorMetrics, LogitsProcessorProtocol, LogitsRequest, LogitsRow
from sagellm.engines.sampling.draws import Edits, Ints

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


def as_tensor(token_ids: Collection[int]) -> torch.Tensor:
    """Return token ids as a tensor, five times as fast as `torch.tensor`."""
    return torch.from_numpy(np.fromiter(token_ids, np.int64, len(token_ids)))


def cells(rows: Sequence[int], token_ids: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the places of tokens in logits, (2, places): of each row, its own token ids.

    Without a Python object per place, of which a batch may have hundreds of thousands.
    """
    sizes = torch.tensor([len(each) for each in token_ids])
    return torch.stack((torch.tensor(rows).repeat_interleave(sizes), torch.cat(list(token_ids)))).to(device)


def forbid(logits: torch.Tensor, rows: Sequence[int], token_ids: Sequence[torch.Tensor]) -> None:
    """Write -inf to the logits of each row's token ids."""
    if rows:
        where = cells(rows, token_ids, logits.device)
        logits[where[0], where[1]] = -torch.inf
