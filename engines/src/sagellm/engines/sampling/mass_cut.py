"""Where a given share of the probability ends, found without sorting."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


class Cut(NamedTuple):
    """What a row keeps: all entries above `value`, and those equal to it except the first `num_dropped`."""

    value: float
    num_dropped: int


def dropped_share(top_p: float) -> float:
    """Return 1 - p, rounded to float32 as in transformers' comparison; negative if p filters nothing."""
    return float(np.float32(1.0 - top_p)) if top_p < 1.0 else -1.0


def mass_cut(row: Floats, weights: Floats, share: float) -> Cut:
    """Find the smallest entries of a row (vocab,) that together weigh at most a share of the whole.

    `weights` (vocab,) must be non-decreasing in the entries. Among equal entries, those with the lower ids
    are dropped first. The largest entry is never dropped. A radix selection: a histogram over the first 11
    bits of the floats, then over the next 11 and the last 10 inside the one bin where the cumulative sum
    crosses the share. About 0.5 ms for 151,936 entries.
    """
    values, keys, mass = row, _ordered_bits(row), weights.astype(np.float64)
    limit = share * float(mass.sum())
    below = 0.0
    for shift, bits in ((21, 11), (10, 11), (0, 10)):
        digits = (keys >> np.uint32(shift)) & np.uint32((1 << bits) - 1)
        histogram = np.bincount(digits, mass, minlength=1 << bits)
        up_to = below + histogram.cumsum()
        # At most the highest digit, so that rounding never drops the largest entry.
        digit = min(int(np.count_nonzero(up_to <= limit)), int(digits.max()))
        below = float(up_to[digit] - histogram[digit])
        inside = np.flatnonzero(digits == digit)
        values, keys, mass = values[inside], keys[inside], mass[inside]
    ties = below + mass.cumsum()
    return Cut(float(values[0]), min(int(np.count_nonzero(ties <= limit)), len(ties) - 1))


def _ordered_bits(row: Floats) -> npt.NDArray[np.uint32]:
    """Return keys in the order of the values; -0.0 and 0.0 share one."""
    bits = (row + np.float32(0.0)).view(np.int32)
    # Negative floats flip all bits, others only the sign bit.
    return (bits ^ ((bits >> 31) | np.int32(-(1 << 31)))).view(np.uint32)
