"""Intervals of paired differences, from a bootstrap of blocks of sessions that follow each other in time.

What happens to a request depends on earlier ones: those of its conversation, and those in the queue. So
sessions are resampled, not requests, and in blocks of neighbours by their first arrival (circular blocks,
Politis and Romano 1992), so that busy times stay whole. A block is a tenth of the sessions, however many
there are: how long a queue or a cache remembers is not known. An interval is the difference ± the bootstrap's
standard error times Student's t of as many degrees of freedom as there are blocks, less one, as for batch
means (Schmeiser 1982). For means that error has a closed form, and nothing is drawn. Relative differences are
intervals of a logarithm. Decision 44 has what they hold, and why not others.
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

MIN_SESSIONS = 20
"""Fewer give no interval, since each block would be a single session."""

_NUM_BLOCKS = 10

NUM_RESAMPLES = 2_000
"""Of a percentile."""

POWER = 0.8
"""The share of traces on which a difference is to be found, where a number of requests is named for it."""

_CELLS = 1 << 21  # of a table that is held at once
_TIMES_BEYOND, _AT_LEAST = 4, 50
"""How many of the largest values are looked at for a percentile, by those beyond it: resamples vary."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A difference, its interval, and its standard error, of a relative one that of the logarithm."""

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
    """b − a, and b ÷ a − 1; None without an interval, or if a divisor is 0."""

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
    """Resamples the sessions of one trace, alike for all metrics and variants.

    `sessions` numbers the session of each request, by first arrival. A mean costs O(requests).
    """

    def __init__(self, sessions: Ints, *, level: float = 0.95, seed: int = 0) -> None:
        self._sessions = sessions
        self.num_sessions = int(sessions.max()) + 1
        self.block_len = max(1, round(self.num_sessions / _NUM_BLOCKS))  # in sessions
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
        sum_a, sum_b, sum_over = float(a.sum()), float(b.sum()), float(over.sum())
        value = (sum_b - sum_a) / sum_over
        absolute = self._estimate(value, self._error_of(b - a - value * over) / sum_over)
        relative = None
        if sum_a > 0 and sum_b > 0:
            error = self._error_of(b / sum_b - a / sum_a)
            relative = _exponential(self._estimate(float(np.log(sum_b / sum_a)), error))
        return Difference(absolute=absolute, relative=relative)

    def percentiles(self, a: Floats, b: Floats, percent: float) -> Difference:
        """Compare percentiles of values, NaN for none in both."""
        if not self.can_tell:
            return Difference(absolute=None, relative=None)
        known = ~np.isnan(a)
        sessions = self._sessions[known]
        point_a, point_b = (float(np.percentile(each[known], percent)) for each in (a, b))
        draws_a, draws_b = (self._percentiles(each[known], sessions, percent) for each in (a, b))
        absolute = self._estimate(point_b - point_a, float(np.std(draws_b - draws_a)))
        relative = None
        if min(point_a, point_b, draws_a.min(), draws_b.min()) > 0:
            error = float(np.std(np.log(draws_b / draws_a)))
            relative = _exponential(self._estimate(float(np.log(point_b / point_a)), error))
        return Difference(absolute=absolute, relative=relative)

    def _estimate(self, value: float, error: float) -> Estimate:
        """Return an interval; `error` lacks what blocks, by the mean of all of them, differ too little."""
        error /= (1 - self.block_len / self.num_sessions) ** 0.5
        reach = student_t(self.level, self.num_blocks - 1) * error
        return Estimate(value=value, low=value - reach, high=value + reach, standard_error=error)

    def _error_of(self, residuals: Floats) -> float:
        """Return the standard deviation of the residuals' sum in a resample; their sum here is 0.

        A resample has n ÷ L blocks of L sessions, each begins at any session and goes on at the first one:
        √(n ÷ L · mean over all of them of the square of their sum).
        """
        sums = np.bincount(self._sessions, residuals, self.num_sessions)
        total = np.cumsum(np.concatenate([[0.0], sums, sums[: self.block_len - 1]]))
        blocks = total[self.block_len :] - total[: -self.block_len]
        return float(np.sqrt(self.num_sessions / self.block_len * np.mean(blocks**2)))

    def _percentiles(self, values: Floats, sessions: Ints, percent: float) -> Floats:
        """Return the percentile in each resample, as `numpy.percentile` has it, counted from the top."""
        order = np.argsort(-values, kind="stable")
        values, sessions = values[order], sessions[order]
        sizes = np.bincount(sessions, minlength=self.num_sessions)
        beyond = 1 - percent / 100
        num_top = min(len(values), round(_TIMES_BEYOND * beyond * len(values)) + _AT_LEAST)
        random = np.random.default_rng(self._seed)
        starts = random.integers(0, self.num_sessions, (NUM_RESAMPLES, self.num_blocks))
        size = max(1, _CELLS // len(values))
        found = []
        for begin in range(0, len(starts), size):
            counts = self._counts(starts[begin : begin + size])
            total = counts @ sizes
            rank = beyond * (total - 1)
            low = np.floor(rank)
            above = np.cumsum(counts[:, sessions[:num_top]], axis=1)
            if (above[:, -1] <= low + 1).any():
                above = np.cumsum(counts[:, sessions], axis=1)
            upper = values[_first_above(above, low)]
            lower = values[_first_above(above, np.minimum(low + 1, total - 1))]
            found.append(upper + (lower - upper) * (rank - low))
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


def num_requests_for(size: float, estimate: Estimate, num_requests: int, level: float = 0.95) -> int:
    """Return how many requests show a difference so large in `POWER` of all cases.

    `size` is one of what the estimate's error is of: of a relative difference log(1 + it).
    n · ((t of the level + z of the power) · standard error ÷ difference)², n the number now.
    """
    errors = student_t(level, _NUM_BLOCKS - 1) + NormalDist().inv_cdf(POWER)
    return round(num_requests * (errors * estimate.standard_error / size) ** 2)


def student_t(level: float, freedom: int) -> float:
    """Return the factor by which a two-sided interval of this level exceeds its standard error.

    Fisher's expansion in 1 ÷ freedom (Abramowitz and Stegun 26.7.5); within 0.5 % from 4 degrees on.
    """
    z = NormalDist().inv_cdf((1 + level) / 2)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / float(freedom) ** power for power, term in enumerate(terms, 1))


def _first_above(below: Ints, ranks: Floats) -> Ints:
    found: Ints = np.argmax(below > ranks[:, None], axis=1)
    return found


def _exponential(log: Estimate) -> Estimate:
    """Turn the logarithm of a ratio into a relative difference."""
    value, low, high = (float(np.expm1(each)) for each in (log.value, log.low, log.high))
    return Estimate(value=value, low=low, high=high, standard_error=log.standard_error)
