"""Forbids the tokens that would end a sequence too early."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sagellm.core import LogitsRequest, LogitsRow
from sagellm.engines.sampling.processors.counting import CountingProcessor, as_tensor, forbid


class Minimum(NamedTuple):
    """How many tokens must come first, and which cannot be chosen until then."""

    num_tokens: int
    stop_token_ids: torch.Tensor


class MinTokens(CountingProcessor[Minimum]):
    """`min_tokens`: stop tokens and the end of sequence cannot be chosen earlier."""

    def _start(self, request: LogitsRequest) -> Minimum | None:
        # A checkpoint may name an end of sequence for which its model has no logit.
        token_ids = [token for token in request.stop_token_ids if token < self._vocab_size]
        return Minimum(request.min_tokens, as_tensor(token_ids)) if request.min_tokens and token_ids else None

    def _apply(self, logits: torch.Tensor, rows: Sequence[LogitsRow[Minimum]]) -> None:
        early = [each for each in rows if len(each.output_token_ids) < each.state.num_tokens]
        forbid(logits, [each.row for each in early], [each.state.stop_token_ids for each in early])
