"""Adds numbers to the logits of single tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sagellm.core import LogitsRequest, LogitsRow
from sagellm.engines.sampling.processors.counting import CountingProcessor

Bias = tuple[list[int], list[float]]  # token ids, and what is added to each


class LogitBias(CountingProcessor[Bias]):
    """`logit_bias`, as in the OpenAI API: 100 all but chooses a token, -100 all but bans it."""

    def _start(self, request: LogitsRequest) -> Bias | None:
        bias = request.logit_bias
        return (list(bias.keys()), list(bias.values())) if bias else None

    def _apply(self, logits: torch.Tensor, rows: Sequence[LogitsRow[Bias]]) -> None:
        places: list[int] = []
        token_ids: list[int] = []
        values: list[float] = []
        for row, (ids, biases), _ in rows:
            places += [row] * len(ids)
            token_ids += ids
            values += biases
        where = torch.tensor([places, token_ids]).to(logits.device)
        logits[where[0], where[1]] += torch.tensor(values).to(logits)  # no cell occurs twice
