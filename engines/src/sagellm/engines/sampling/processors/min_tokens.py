"""Forbids the tokens that would end a sequence too early."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sagellm.core import LogitsRequest, LogitsRow
from sagellm.engines.sampling.processors.counting import CountingProcessor, forbid


class Minimum(NamedTuple):
    """How many tokens must come first, and which cannot be chosen until then."""

    num_tokens: int
    stop_token_ids: tuple[int, ...]


class MinTokens(CountingProcessor[Minimum]):
    """`min_tokens`: stop tokens and the end of sequence cannot be chosen earlier."""

    def _start(self, request: LogitsRequest) -> Minimum | None:
        # A checkpoint may name an end of sequence for which its model has no logit.
        token_ids = tuple(token for token in request.stop_token_ids if token < self._vocab_size)
        return Minimum(request.min_tokens, token_ids) if request.min_tokens and token_ids else None

    def _apply(self, logits: torch.Tensor, rows: Sequence[LogitsRow[Minimum]]) -> None:
        cells = [
            (row, token)
            for row, minimum, output_token_ids in rows
            if len(output_token_ids) < minimum.num_tokens
            for token in minimum.stop_token_ids
        ]
        forbid(logits, cells)
