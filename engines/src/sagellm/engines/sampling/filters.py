"""Temperature, min-p, top-k and top-p on whole rows of logits, applied in this order.

Each takes logits (rows, vocab) float32 and one setting per row — a tensor (rows,), best on the CPU, where
reading it does not synchronize — or one number for all. Each returns logits with filtered entries at -inf,
like transformers' warper of the same name; rows without the filter are skipped, and if no row has it the
logits themselves are returned. The sampler reads whole rows only if the few largest candidates do not decide
(candidates.py).
"""

from __future__ import annotations

from typing import TypeAlias

import torch

from sagellm.engines.sampling.mass_cut import dropped_share, mass_cut
from sagellm.engines.sampling.selection import kth_largest

PerRow: TypeAlias = torch.Tensor | float


def apply_temperature(logits: torch.Tensor, temperature: PerRow) -> torch.Tensor:
    """Divide each row by its temperature, which must be above 0."""
    temperatures = _per_row(logits, temperature)
    if bool((temperatures == 1.0).all()):
        return logits
    return logits / temperatures.to(logits)[:, None]


def apply_min_p_filtering(logits: torch.Tensor, min_p: PerRow) -> torch.Tensor:
    """Keep tokens of at least min_p times the probability of the most likely one (arXiv 2407.01082)."""
    share = _per_row(logits, min_p)
    rows = _active(share > 0.0)
    if rows is None:
        return logits
    probabilities = logits[rows].softmax(-1)
    least = probabilities.amax(-1, keepdim=True) * share[rows].to(logits)[:, None]
    return _masked(logits, rows, probabilities < least)


def apply_top_k_filtering(logits: torch.Tensor, top_k: PerRow) -> torch.Tensor:
    """Keep the k largest logits of each row and any equal to the k-th; 0, -1 and k ≥ vocab keep all."""
    counts = _per_row(logits, top_k).long()
    rows = _active((counts > 0) & (counts < logits.shape[1]))
    if rows is None:
        return logits
    least = torch.cat([kth_largest(logits[row : row + 1], int(counts[row])) for row in rows.tolist()])
    return _masked(logits, rows, logits[rows] < least)


def apply_top_p_filtering(logits: torch.Tensor, top_p: PerRow) -> torch.Tensor:
    """Keep the fewest most likely tokens of each row whose probabilities reach p (arXiv 1904.09751).

    The token that crosses p stays, and so does the most likely one. Among equally likely tokens at the
    border, those with the higher ids stay, as with the stable sort in transformers' warper. Exact selection
    without a sort, about 1 ms per row of 151,936.
    """
    shares = _per_row(logits, top_p)
    rows = _active(shares < 1.0)
    if rows is None:
        return logits
    active = logits[rows].cpu()
    probabilities = active.softmax(-1)
    removed = torch.empty_like(active, dtype=torch.bool)
    for place, row in enumerate(rows.tolist()):
        cut = mass_cut(active[place].numpy(), probabilities[place].numpy(), dropped_share(float(shares[row])))
        torch.lt(active[place], cut.value, out=removed[place])
        if cut.num_dropped:
            removed[place, (active[place] == cut.value).nonzero()[: cut.num_dropped, 0]] = True
    return _masked(logits, rows, removed.to(logits.device))


def _per_row(logits: torch.Tensor, setting: PerRow) -> torch.Tensor:
    """Return a setting as one number per row; Python numbers keep their precision."""
    dtype = None if isinstance(setting, torch.Tensor) else torch.float64
    return torch.as_tensor(setting, dtype=dtype).expand(logits.shape[0])


def _active(mask: torch.Tensor) -> torch.Tensor | None:
    rows = mask.nonzero()[:, 0]
    return rows if len(rows) else None


def _masked(logits: torch.Tensor, rows: torch.Tensor, removed: torch.Tensor) -> torch.Tensor:
    """Return a copy of the logits with the removed entries (count, vocab) of the given rows at -inf."""
    if len(rows) == logits.shape[0]:
        return logits.masked_fill(removed, -torch.inf)
    filtered = logits.clone()
    filtered[rows] = filtered[rows].masked_fill(removed, -torch.inf)
    return filtered
