"""Writes to single cells of logits, with torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sagellm.engines.sampling.processors.counting import Longs


def cells(rows: Sequence[int], token_ids: Sequence[Longs], device: torch.device) -> torch.Tensor:
    """Return the places of tokens in logits, (2, places): of each row, its own token ids.

    Without a Python object per place, of which a batch may have hundreds of thousands.
    """
    places = np.repeat(np.array(rows, np.int64), [len(each) for each in token_ids])
    return torch.from_numpy(np.stack((places, np.concatenate(token_ids)))).to(device)


def forbid(logits: torch.Tensor, rows: Sequence[int], token_ids: Sequence[Longs]) -> None:
    """Write -inf to the logits of each row's token ids."""
    if rows:
        where = cells(rows, token_ids, logits.device)
        logits[where[0], where[1]] = -torch.inf
