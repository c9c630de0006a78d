"""Adds numbers to the logits of single tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from sagellm.core import LogitsRequest, LogitsRow
from sagellm.engines.sampling.draws import Edits, Ints, edits_of
from sagellm.engines.sampling.processors.counting import Longs, SparseProcessor, as_array

if TYPE_CHECKING:
    import torch


class Bias(NamedTuple):
    """What is added to the logits of tokens."""

    token_ids: Longs
    values: npt.NDArray[np.float32]
    edits: Edits


class LogitBias(SparseProcessor[Bias]):
    """`logit_bias`, as in the OpenAI API: 100 all but chooses a token, -100 all but bans it."""

    def _start(self, request: LogitsRequest) -> Bias | None:
        bias = request.logit_bias
        if not bias:
            return None
        values = np.fromiter(bias.values(), np.float32, len(bias))
        return Bias(as_array(bias.keys()), values, edits_of(bias.keys(), values))

    def _edits(self, state: Bias, output_token_ids: Ints) -> Edits:
        return state.edits

    def _apply(self, logits: torch.Tensor, rows: Sequence[LogitsRow[Bias]]) -> None:
        import torch

        from sagellm.engines.sampling.processors.cells import cells

        where = cells([row.row for row in rows], [row.state.token_ids for row in rows], logits.device)
        values = torch.from_numpy(np.concatenate([row.state.values for row in rows]))
        logits[where[0], where[1]] += values.to(logits)  # no cell occurs twice
