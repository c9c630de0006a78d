"""Forbids all tokens except the allowed ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sagellm.core import LogitsRequest, LogitsRow
from sagellm.engines.sampling.processors.counting import CountingProcessor


class AllowedTokenIds(CountingProcessor[torch.Tensor]):
    """`allowed_token_ids`: nothing else is chosen."""

    def _start(self, request: LogitsRequest) -> torch.Tensor | None:
        return torch.tensor(request.allowed_token_ids) if request.allowed_token_ids else None

    def _apply(self, logits: torch.Tensor, rows: Sequence[LogitsRow[torch.Tensor]]) -> None:
        places = torch.tensor([row.row for row in rows])
        sizes = torch.tensor([len(row.state) for row in rows])
        where = torch.stack((places.repeat_interleave(sizes), torch.cat([row.state for row in rows])))
        cells, token_ids = where.to(logits.device)
        kept = logits[cells, token_ids]
        logits[places.to(logits.device)] = -torch.inf
        logits[cells, token_ids] = kept
