"""Forbids the tokens that would end a sequence too early."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from sagellm.core import LogitsRequest, LogitsRow
from sagellm.engines.sampling.draws import Edits, Ints, edits_of
from sagellm.engines.sampling.processors.counting import Longs, SparseProcessor, as_array

if TYPE_CHECKING:
    import torch


class Minimum(NamedTuple):
    """How many tokens must come first, and which cannot be chosen until then."""

    num_tokens: int
    stop_token_ids: Longs
    edits: Edits


class MinTokens(SparseProcessor[Minimum]):
    """`min_tokens`: stop tokens and the end of sequence cannot be chosen earlier."""

    def _start(self, request: LogitsRequest) -> Minimum | None:
        # A checkpoint may name an end of sequence for which its model has no logit.
        token_ids = [token for token in request.stop_token_ids if token < self._vocab_size]
        if not request.min_tokens or not token_ids:
            return None
        return Minimum(request.min_tokens, as_array(token_ids), edits_of(token_ids))

    def _edits(self, state: Minimum, output_token_ids: Ints) -> Edits | None:
        return state.edits if len(output_token_ids) < state.num_tokens else None

    def _apply(self, logits: torch.Tensor, rows: Sequence[LogitsRow[Minimum]]) -> None:
        from sagellm.engines.sampling.processors.cells import forbid

        early = [each for each in rows if len(each.output_token_ids) < each.state.num_tokens]
        forbid(logits, [each.row for each in early], [each.state.stop_token_ids for each in early])
