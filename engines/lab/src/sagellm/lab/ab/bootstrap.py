"""Intervals of paired differences: a bootstrap of blocks of sessions that follow each other in time.

What happens to a request depends on those before it: its own conversation, and whoever is in the queue. So
sessions are resampled, not requests, and in blocks of √n neighbours by their first arrival (circular moving
blocks, Politis and Romano 1992), so that busy times stay whole. A mean's interval is symmetric and
studentized: ± the 95th percentile of |t*| times the standard error, with t* the error of a resample in its
own standard errors (Hall 1988). Decision 44 has what it covers, and why not another.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from sagellm.core import TraceRequest

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MIN_SESSIONS = 16
"""With fewer there is no interval: √n blocks would be fewer than four."""

NUM_RESAMPLES = 10_000
NUM_PERCENTILE_RESAMPLES = 2_000
POWER = 0.8

_CELLS = 1 << 21  # of a table that is held at once


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A difference, its interval, and its standard error; all in its unit, a relative one as a fraction."""

    value: float
    low: float
    high: float
    standard_error: float

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True, kw_only=True)
class Difference:
    """b − a, and b ÷ a − 1; None where there is no interval or nothing to divide by."""

    absolute: Estimate | None
    relative: Estimate | None


def sessions_of(requests: Seq[TraceRequest]) -> Ints:
    """Number the session of each request by first arrival; a request without a conversation is its own."""
    numbers: dict[tuple[str, str] | int, int] = {}
    found = [
        numbers.setdefault((one.tenant, one.conversation) if one.conversation else index, len(numbers))
        for index, one in enumerate(requests)
    ]
    return np.array(found, np.int64)


class BlockBootstrap:
    """Resamples the sessions of one trace; all metrics of all variants see the same resamples.

    `sessions` numbers the session of each request, by first arrival. O(resamples · √sessions) a mean.
    """

    def __init__(self, sessions: Ints, *, level: float = 0.95, seed: int = 0) -> None:
        self._sessions = sessions
        self.num_sessions = int(sessions.max()) + 1
        self.block_len = max(1, round(self.num_sessions**0.5))  # in sessions
        self.num_blocks = round(self.num_sessions / self.block_len)
        self.level, self._seed = level, seed

    @property
    def can_tell(self) -> bool:
        """Whether there are enough sessions for an interval."""
        return self.num_sessions >= MIN_SESSIONS

    def means(self, a: Floats, b: Floats, over: Floats) -> Difference:
        """Compare Σ b ÷ Σ `over` with Σ a ÷ Σ `over`; each has a value for each request, 0 for none."""
        if not self.can_tell:
            return Difference(absolute=None, relative=None)
        sums = [
            np.bincount(self._sessions, each, self.num_sessions).astype(np.float64) for each in (a, b, over)
        ]
        blocks_a, blocks_b, blocks_over = (self._blocks(each) for each in sums)
        absolute = self._studentized(blocks_b - blocks_a, blocks_over)
        relative = None
        if sums[0].sum() > 0 and sums[1].sum() > 0:
            relative = _exponential(self._studentized(blocks_b, blocks_a, is_log=True))
        return Difference(absolute=absolute, relative=relative)

    def percentiles(self, a: Floats, b: Floats, percent: float) -> Difference:
        """Compare percentiles of values, NaN for none in both."""
        if not self.can_tell:
            return Difference(absolute=None, relative=None)
        known = ~np.isnan(a)
        sessions = self._sessions[known]
        point_a, point_b = (float(np.percentile(each[known], percent)) for each in (a, b))
        draws_a, draws_b = (self._percentiles(each[known], sessions, percent) for each in (a, b))
        absolute = self._around(point_b - point_a, draws_b - draws_a)
        relative = None
        if min(point_a, point_b, draws_a.min(), draws_b.min()) > 0:
            log = self._around(float(np.log(point_b / point_a)), np.log(draws_b / draws_a))
            relative = _exponential(log)
        return Difference(absolute=absolute, relative=relative)

    def _blocks(self, sums: Floats) -> Floats:
        """Return the sum of each block, which may begin at any session and goes on at the first."""
        total = np.concatenate([[0.0], np.cumsum(np.concatenate([sums, sums[: self.block_len - 1]]))])
        blocks: Floats = total[self.block_len :] - total[: -self.block_len]
        return blocks

    def _starts(self, num_resamples: int) -> Ints:
        random = np.random.default_rng(self._seed)
        return random.integers(0, self.num_sessions, (num_resamples, self.num_blocks))

    def _studentized(self, x: Floats, y: Floats, *, is_log: bool = False) -> Estimate:
        """Return Σ x ÷ Σ y over blocks, or its logarithm, with its interval."""
        columns = np.stack([x, y, x * x, x * y, y * y], axis=1)
        centre = columns.mean(axis=0, keepdims=True) * self.num_blocks
        value, error = (float(each[0]) for each in _value_and_error(centre, is_log=is_log))
        ts = []
        size = max(1, _CELLS // self.num_blocks)
        starts = self._starts(NUM_RESAMPLES)
        for begin in range(0, NUM_RESAMPLES, size):
            part = starts[begin : begin + size]
            sums = np.stack([columns[:, k][part].sum(axis=1) for k in range(columns.shape[1])], axis=1)
            values, errors = _value_and_error(sums, is_log=is_log)
            with np.errstate(invalid="ignore", divide="ignore"):
                ts.append(np.abs(values - value) / errors)
        t = np.concatenate(ts)
        t = t[~np.isnan(t)]  # a resample without any difference
        reach = float(np.quantile(t, self.level)) * error if len(t) and error else 0.0
        return Estimate(value=value, low=value - reach, high=value + reach, standard_error=error)

    def _percentiles(self, values: Floats, sessions: Ints, percent: float) -> Floats:
        """Return the percentile in each resample, as `numpy.percentile` has it."""
        order = np.argsort(values, kind="stable")
        values, sessions = values[order], sessions[order]
        starts = self._starts(NUM_PERCENTILE_RESAMPLES)
        size = max(1, _CELLS // len(values))
        found = []
        for begin in range(0, len(starts), size):
            counts = self._counts(starts[begin : begin + size])
            below = np.cumsum(counts[:, sessions], axis=1)
            rank = percent / 100 * (below[:, -1] - 1)
            low = np.floor(rank)
            lower = values[_first_above(below, low)]
            upper = values[_first_above(below, np.minimum(low + 1, below[:, -1] - 1))]
            found.append(lower + (upper - lower) * (rank - low))
        return np.concatenate(found)

    def _counts(self, starts: Ints) -> Ints:
        """Return how often each session is in each resample."""
        rows, num, length = len(starts), self.num_sessions, self.block_len
        flat = (np.arange(rows)[:, None] * num + starts).ravel()
        begun = np.bincount(flat, minlength=rows * num).reshape(rows, num)
        ahead = np.concatenate([begun[:, num - length + 1 :], begun], axis=1)
        total = np.concatenate([np.zeros((rows, 1), np.int64), np.cumsum(ahead, axis=1)], axis=1)
        counts: Ints = total[:, length:] - total[:, :-length]
        return counts

    def _around(self, value: float, draws: Floats) -> Estimate:
        errors = np.abs(draws - value)
        reach = float(np.quantile(errors, self.level))
        error = float(np.sqrt(np.mean(errors**2)))
        return Estimate(value=value, low=value - reach, high=value + reach, standard_error=error)


def num_requests_for(relative: float, estimate: Estimate, num_requests: int, level: float = 0.95) -> int:
    """Return how many requests show a relative difference so large in `POWER` of all cases.

    n · ((z of the level + z of the power) · standard error ÷ difference)², n the number now.
    """
    normal = NormalDist()
    z = normal.inv_cdf((1 + level) / 2) + normal.inv_cdf(POWER)
    return round(num_requests * (z * estimate.standard_error / relative) ** 2)


def _value_and_error(sums: Floats, *, is_log: bool) -> tuple[Floats, Floats]:
    """Return value and standard error by row; rows are Σ x, Σ y, Σ x², Σ xy and Σ y² over blocks.

    The error is that of the residuals x − r·y, r = Σ x ÷ Σ y: √Σ(x − r·y)² ÷ Σ y, and ÷ Σ x for log r.
    """
    x, y, xx, xy, yy = sums.T
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = x / y
        residual = np.sqrt(np.maximum(0.0, xx - 2 * ratio * xy + ratio * ratio * yy))
        return (np.log(ratio), residual / x) if is_log else (ratio, residual / y)


def _first_above(below: Ints, ranks: Floats) -> Ints:
    found: Ints = np.argmax(below > ranks[:, None], axis=1)
    return found


def _exponential(log: Estimate) -> Estimate:
    """Turn the logarithm of a ratio into a relative difference."""
    value, low, high = (float(np.expm1(each)) for each in (log.value, log.low, log.high))
    return Estimate(value=value, low=low, high=high, standard_error=log.standard_error)
