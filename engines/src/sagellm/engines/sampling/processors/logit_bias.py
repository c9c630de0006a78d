"""Adds numbers to the logits of single tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sagellm.core import LogitsRequest, LogitsRow
from sagellm.engines.sampling.processors.counting import CountingProcessor, as_tensor, cells

Bias = tuple[torch.Tensor, torch.Tensor]  # token ids, and what is added to each


class LogitBias(CountingProcessor[Bias]):
    """`logit_bias`, as in the OpenAI API: 100 all but chooses a token, -100 all but bans it."""

    def _start(self, request: LogitsRequest) -> Bias | None:
        bias = request.logit_bias
        if not bias:
            return None
        values = torch.from_numpy(np.fromiter(bias.values(), np.float32, len(bias)))
        return as_tensor(bias.keys()), values

    def _apply(self, logits: torch.Tensor, rows: Sequence[LogitsRow[Bias]]) -> None:
        where = cells([row.row for row in rows], [row.state[0] for row in rows], logits.device)
        values = torch.cat([row.state[1] for row in rows])
        logits[where[0], where[1]] += values.to(logits)  # no cell occurs twice
