"""Forbids all tokens except the allowed ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sagellm.core import LogitsRequest, LogitsRow
from sagellm.engines.sampling.processors.counting import CountingProcessor, as_tensor, cells


class AllowedTokenIds(CountingProcessor[torch.Tensor]):
    """`allowed_token_ids`: nothing else is chosen."""

    def _start(self, request: LogitsRequest) -> torch.Tensor | None:
        return as_tensor(request.allowed_token_ids) if request.allowed_token_ids else None

    def _apply(self, logits: torch.Tensor, rows: Sequence[LogitsRow[torch.Tensor]]) -> None:
        places = [row.row for row in rows]
        where = cells(places, [row.state for row in rows], logits.device)
        kept = logits[where[0], where[1]]
        logits[torch.tensor(places).to(logits.device)] = -torch.inf
        logits[where[0], where[1]] = kept
