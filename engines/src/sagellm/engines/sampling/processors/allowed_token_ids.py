"""Forbids all tokens except the allowed ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from sagellm.core import LogitsRequest, LogitsRow
from sagellm.engines.sampling.processors.counting import Longs, SparseProcessor, as_array

if TYPE_CHECKING:
    import torch


class Allowed(NamedTuple):
    """The tokens that may be chosen."""

    token_ids: Longs
    mask: npt.NDArray[np.uint32]  # as in `TokenMasks`


class AllowedTokenIds(SparseProcessor[Allowed]):
    """`allowed_token_ids`: nothing else is chosen."""

    def _start(self, request: LogitsRequest) -> Allowed | None:
        if not request.allowed_token_ids:
            return None
        token_ids = as_array(request.allowed_token_ids)
        bits = np.zeros(-(-self._vocab_size // 32) * 32, np.bool_)
        bits[token_ids] = True
        return Allowed(token_ids, np.packbits(bits, bitorder="little").view("<u4"))

    def allowed(self, state: Allowed) -> npt.NDArray[np.uint32]:
        """Return the mask of a sequence."""
        return state.mask

    def _apply(self, logits: torch.Tensor, rows: Sequence[LogitsRow[Allowed]]) -> None:
        from sagellm.engines.sampling.processors.cells import cells

        places = [row.row for row in rows]
        where = cells(places, [row.state.token_ids for row in rows], logits.device)
        kept = logits[where[0], where[1]]
        logits[places] = -float("inf")
        logits[where[0], where[1]] = kept
