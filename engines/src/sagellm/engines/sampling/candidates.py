"""Filters decided on the few largest logits of each row.

In order of logit, the filters always keep a prefix of the row. So if that prefix ends within the candidates,
the other 151,000 logits need not be read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from sagellm.engines.sampling.selection import Candidates


@dataclass(frozen=True, slots=True)
class FilterSettings:
    """The filters of some rows, each (rows, 1) on the logits' device."""

    temperature: torch.Tensor  # float32, above 0
    min_p: torch.Tensor  # float32, 0 disables it
    top_k: torch.Tensor  # int64, 0 disables it
    dropped_share: torch.Tensor  # float64, 1 - top_p; negative disables it


class Kept(NamedTuple):
    """Weights of the candidates, and whether they decide the row."""

    weights: torch.Tensor  # (rows, count) float64, not normalised; 0 for what is filtered
    is_decided: torch.Tensor  # (rows,) bool; if not, the row has to be filtered whole


def keep(
    candidates: Candidates, settings: FilterSettings, *, vocab_size: int, mass: torch.Tensor | None
) -> Kept:
    """Apply temperature, min-p, top-k and top-p to the candidates of rows that have filters.

    `mass` (rows, 1) is the sum of exp(logit / temperature - the largest such) over whole rows. It is needed
    if only top-p can end a row; None says that each row has min-p or top-k, whose survivors' mass is used
    instead.
    """
    scaled = candidates.values / settings.temperature
    count = scaled.shape[1]
    weights = (scaled - scaled[:, :1]).exp().double()
    survives = (weights >= settings.min_p) & (scaled > -torch.inf)
    survives &= scaled >= _kth(scaled, settings.top_k)
    weights = torch.where(survives, weights, 0.0)
    cumulative = weights.cumsum(1)
    before = cumulative - weights
    total = cumulative[:, -1:] if mass is None else mass
    # Equal candidates are ordered by falling id: the ones that top-p drops have the lower ids.
    in_nucleus = survives & ((total - before > settings.dropped_share * total) | (before == 0.0))
    # Without the mass of the whole row, min-p and top-k must end within the candidates.
    last = (survives if mass is None else in_nucleus).sum(1, keepdim=True).clamp(min=1) - 1
    # Tokens outside the candidates are at most equal to the smallest candidate.
    ends_inside = (scaled.gather(1, last) > scaled[:, -1:])[:, 0]
    is_decided = ends_inside | torch.full_like(ends_inside, count == vocab_size)
    return Kept(torch.where(in_nucleus, weights, 0.0), is_decided)


def _kth(scaled: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Return the k-th largest logit of each row, -inf for rows without top-k."""
    kth = scaled.gather(1, (top_k - 1).clamp(min=0, max=scaled.shape[1] - 1))
    return torch.where(top_k > 0, kth, -torch.inf)


def draw_candidate(candidates: Candidates, weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return one id per row (rows,) by inverse transform, given its uniform number (rows, 1).

    Tokens are ordered by id, not by weight: a last-bit difference, as in another batch, must not swap two of
    them.
    """
    ids, order = candidates.ids.sort(dim=1)
    cumulative = weights.gather(1, order).cumsum(1)
    place = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    return ids.gather(1, place.clamp(max=ids.shape[1] - 1))[:, 0]
