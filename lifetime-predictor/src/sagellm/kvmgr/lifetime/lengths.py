"""Distributions of output lengths over bins that widen with the length."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

NUM_BINS = 128
"""Up to 171,000 tokens; bins are 1.2 tokens wide at first, then 7 % of the length."""

_SCALE, _WIDTH = 16.0, 9.28 / NUM_BINS


def position_of(length: float) -> float:
    """Return where a length lies among the bins, in bins from 0."""
    return min(math.log1p(max(length, 0.0) / _SCALE) / _WIDTH, NUM_BINS - 1e-6)


def bin_of(length: float) -> int:
    """Return the bin of a length."""
    return int(position_of(length))


def positions_of(lengths: Floats) -> Floats:
    """Return where lengths lie among the bins."""
    found: Floats = np.minimum(np.log1p(np.maximum(lengths, 0.0) / _SCALE) / _WIDTH, NUM_BINS - 1e-6)
    return found


def lengths_at(positions: Floats) -> Floats:
    """Return the lengths that lie at positions."""
    found: Floats = _SCALE * np.expm1(positions * _WIDTH)
    return found


_EDGES = lengths_at(np.arange(NUM_BINS + 1.0))


def _tail() -> Floats:
    """Return a heavy-tailed prior: P(length > y) = 16 / (16 + y)."""
    edges = np.exp(-_WIDTH * np.arange(NUM_BINS + 1))
    edges[-1] = 0.0
    found: Floats = edges[:-1] - edges[1:]
    return found


TAIL = _tail()
"""What a length is like of which nothing is known."""


class Histogram:
    """Counts by bin, in which older ones count for less: by `decay` with each that is added."""

    def __init__(self, decay: float, num_bins: int = NUM_BINS) -> None:
        self._counts: Floats = np.zeros(num_bins)
        self._total = 0.0
        self._growth, self._weight = 1 / decay, 1.0  # what is new weighs more, instead of all else less

    def add(self, place: int | Floats) -> None:
        """Count one more: in a bin, or spread over them as a density."""
        self._weight *= self._growth
        if isinstance(place, int):
            self._counts[place] += self._weight
        else:
            self._counts += self._weight * place
        self._total += self._weight
        if self._weight > 1e9:
            self._counts /= self._weight
            self._total /= self._weight
            self._weight = 1.0

    @property
    def total(self) -> float:
        """How many of the latest they are worth together."""
        return self._total / self._weight

    def counts(self, begin: int = 0, end: int | None = None) -> Floats:
        """Return the counts of a range of bins, in counts of the latest."""
        found: Floats = self._counts[begin:end] / self._weight
        return found

    def density(self, prior: Floats, strength: float) -> Floats:
        """Return the shares of the bins, with a density that counts as `strength` observations."""
        found: Floats = (self.counts() + strength * prior) / (self.total + strength)
        return found


_FEW_ROWS = 16
"""Rows from which on quantiles are found in all of them at once."""


def quantiles(cumulated: Floats, gone: Floats, levels: Floats) -> Floats:
    """Return the positions of the quantiles of what is left of distributions when shares are gone.

    `cumulated` (rows, bins + 1) are distributions, which rise everywhere; `gone` (rows, 1) and `levels`
    (levels,) shares, the result (rows, levels) positions.
    """
    rows = np.arange(len(cumulated))
    wanted = gone + (1 - gone) * levels
    places = np.empty(wanted.shape, np.intp)
    if len(rows) < _FEW_ROWS:
        for row in rows.tolist():
            places[row] = cumulated[row, 1:-1].searchsorted(wanted[row])
    else:
        for level in range(wanted.shape[1]):
            places[:, level] = (cumulated[:, 1:-1] < wanted[:, level, None]).sum(1)
    low, high = cumulated[rows[:, None], places], cumulated[rows[:, None], places + 1]
    found: Floats = places.astype(np.float64) + np.clip(
        (wanted - low) / np.maximum(high - low, 1e-12), 0.0, 1.0
    )
    return found


def share_below(cumulated: Floats, positions: Floats) -> Floats:
    """Return the shares of distributions (rows, bins + 1) below positions (rows, any)."""
    places = positions.astype(np.intp)
    rows = np.arange(len(cumulated))[:, None]
    low = cumulated[rows, places]
    found: Floats = low + (positions - places) * (cumulated[rows, places + 1] - low)
    return found


def means_behind(cumulated: Floats, gone: Floats, starts: Floats, limits: Floats) -> Floats:
    """Return the mean lengths (rows,) of what is left of distributions behind `starts`, cut at `limits`.

    `cumulated` (rows, bins + 1), the shares below the starts (rows, 1), `starts` positions (rows,), `limits`
    lengths (rows,). The mean is what lies between: the start, and the area under the share that is longer.
    """
    first = lengths_at(starts)[:, None]
    edges = np.clip(_EDGES, first, np.maximum(limits[:, None], first))
    longer = (1 - np.maximum(cumulated, gone)) / np.maximum(1 - gone, 1e-12)
    found: Floats = first[:, 0] + (np.diff(edges) * (longer[:, 1:] + longer[:, :-1]) / 2).sum(1)
    return found
