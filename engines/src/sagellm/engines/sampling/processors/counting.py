"""What our processors share: counting, and writing single cells."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from sagellm.core import LogitsProcessorMetrics, LogitsProcessorProtocol, LogitsRequest, LogitsRow

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


Cells = list[tuple[int, int]]
"""Rows and token ids of single logits."""


def forbid(logits: torch.Tensor, cells: Cells) -> None:
    """Write -inf into cells of logits (rows, vocab)."""
    if cells:
        rows, token_ids = torch.tensor(cells).to(logits.device).T
        logits[rows, token_ids] = -torch.inf
