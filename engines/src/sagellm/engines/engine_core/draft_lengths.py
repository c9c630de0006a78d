"""How many draft tokens pay, from what was accepted and what steps took."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]

MAX_DRAFT = 16
"""Most tokens of a draft."""

_MEMORY, _SHARED_MEMORY = 0.9, 0.99
"""How much of what was seen counts after one more draft: of a sequence's, and of those of all."""

_PRIOR_ACCEPTANCE, _PRIOR_TRIALS = 0.6, 4.0
"""What is assumed of all sequences at first; the weight of all in what is assumed of one."""

_STEP_WEIGHT = 1 / 8
"""Of a new step in a measured time, once there are as many."""

_RIDGE = 0.02
"""Weight of a cost in proportion to the draft tokens, as long as their number hardly varies."""

_MARGIN = 1.02
"""By how much drafts must pay."""

_REVIEW_STEPS = 8
"""Steps between two decisions."""

_PLAIN_STEPS = 64
"""While drafts are made, one of as many steps is without, to see what it takes."""

_PROBE_DRAFTS, _PROBE_TOKENS = (6, 2), 32
"""Tokens of drafts while their cost is unknown, in turn, to tell what a token costs from what any costs; and
most of a step, since many may cost many steps' time."""

_NUM_PLAIN, _NUM_TRIALS = 2, 3
"""Steps without drafts, and then with them, before anything is decided: the first of each may be slow."""

_FIRST_PROBE, _LAST_PROBE = 64, 4096
"""Steps without drafts after which they are tried again: twice as many each time."""

_LONE_REVIEWS = 16
"""Decisions after which a sequence is tried again while others have drafts."""


@dataclass(slots=True)
class _Times:
    """What steps of one number of rows take: without drafts, and how much more with them."""

    plain_ns: float = 0.0
    num_plain: int = 0
    num_drafted: int = 0
    tokens: float = 0.0  # moving means over steps with drafts
    tokens_squared: float = 0.0
    extra: float = 0.0  # of `plain_ns`, as are the other costs
    extra_tokens: float = 0.0

    def add_plain(self, took_ns: int) -> None:
        self.num_plain += 1
        if self.num_plain > 1:
            took_ns = min(took_ns, int(2 * self.plain_ns))
        self.plain_ns += max(1 / self.num_plain, _STEP_WEIGHT) * (took_ns - self.plain_ns)

    def add_drafted(self, took_ns: int, num_tokens: int) -> None:
        self.num_drafted += 1
        extra = max(0.0, took_ns / self.plain_ns - 1.0)
        if self.num_drafted > 1:
            extra = min(extra, 4 * self.extra + 0.5)
        weight = max(1 / self.num_drafted, _STEP_WEIGHT)
        if self.num_drafted == 2 and extra * self.tokens < self.extra * num_tokens:
            weight = 1.0  # the first one warmed something up
        self.tokens += weight * (num_tokens - self.tokens)
        self.tokens_squared += weight * (num_tokens**2 - self.tokens_squared)
        self.extra += weight * (extra - self.extra)
        self.extra_tokens += weight * (num_tokens * extra - self.extra_tokens)

    @property
    def costs(self) -> tuple[float, float]:
        """What a step costs more with drafts: for any, and for each token; of `plain_ns`."""
        square = self.tokens**2
        variance = max(0.0, self.tokens_squared - square)
        covariance = self.extra_tokens - self.tokens * self.extra
        slope = (covariance + _RIDGE * self.tokens * self.extra) / (variance + _RIDGE * square)
        slope = min(max(0.0, slope), self.extra / self.tokens)
        return self.extra - slope * self.tokens, slope


class DraftLengths:
    """Chooses the length of each sequence's next draft.

    A draft of k tokens, each accepted with probability α after those before it, gives α + α² + … + αᵏ tokens
    more; a step with K draft tokens takes 1 + f + c·K times as long. The lengths are those that give most
    tokens in the time, which for one sequence maximizes (1 - αᵏ⁺¹) / ((1 - α)(1 + f + c·k)), or 0 if
    that does not pay. α is measured for each sequence and starts with that of all, f and c for each number
    of rows; the proposer's own time is part of f. Where drafts do not pay, they are tried again after 64
    steps, then 128, and so on.

    Times are of steps that only decode. A fit to all steps does not tell what a token costs beyond the first
    of a row, since decodes have exactly one.
    """

    def __init__(self, num_seats: int, *, is_adaptive: bool = True) -> None:
        self._is_adaptive = is_adaptive
        self._accepted: Floats = np.zeros(num_seats)  # moving sums
        self._tried: Floats = np.zeros(num_seats)
        self._all = np.array([_PRIOR_ACCEPTANCE, 1.0]) * _PRIOR_TRIALS  # the same for all
        self._wanted: Ints = np.full(num_seats, MAX_DRAFT, np.int32)
        self._times: dict[int, _Times] = {}
        self._size = -1  # of the batch that was decided about
        self._num_steps = self._num_reviews = 0  # since the last decision; in all
        self._is_plain = False  # drafts do not pay
        self._num_plain, self._probe_after = 0, _FIRST_PROBE
        self._num_probes = 0

    @property
    def acceptance(self) -> float:
        """How likely a draft token is accepted after those before it, of late."""
        return float(self._all[0] / self._all[1])

    def start(self, seat: int) -> None:
        """Know nothing of a seat's next sequence."""
        self._accepted[seat] = self._tried[seat] = 0.0
        self._wanted[seat] = MAX_DRAFT

    def learn(self, seats: npt.NDArray[np.intp], num_drafts: Ints, num_accepted: Ints) -> None:
        """Note what became of drafts: the tokens of each, at least 1, and how many were accepted."""
        tried = np.minimum(num_accepted + 1, num_drafts)  # those after a refused one say nothing
        self._accepted[seats] = _MEMORY * self._accepted[seats] + num_accepted
        self._tried[seats] = _MEMORY * self._tried[seats] + tried
        self._all *= _SHARED_MEMORY
        self._all += (num_accepted.sum(), tried.sum())

    def measure(self, num_rows: int, num_drafts: int, took_ns: int) -> None:
        """Note what a step of decoding rows took: the tokens of its drafts, and the time."""
        times = self._times.setdefault(_size_of(num_rows), _Times())
        if not num_drafts:
            times.add_plain(took_ns)
        elif times.num_plain:
            times.add_drafted(took_ns, num_drafts)
            if times.num_drafted <= _NUM_TRIALS:
                self._num_steps = _REVIEW_STEPS  # decide at once

    def rests(self, num_rows: int) -> bool:
        """Whether a step has no drafts because they did not pay for as many rows; counts the step if so."""
        if not self._is_plain or self._num_plain + 1 >= self._probe_after or _size_of(num_rows) != self._size:
            return False
        self._num_plain += 1
        return True

    def wanted(self, seats: npt.NDArray[np.intp], propose_ns: float) -> Ints | None:
        """Return how long drafts of a step's decoding rows (rows,) should be; None if all 0.

        `propose_ns` is what asking for them takes.
        """
        if not self._is_adaptive:
            return self._wanted.take(seats)
        size = _size_of(len(seats))
        times = self._times.get(size)
        if times is None or times.num_plain < _NUM_PLAIN:
            return None  # first see what a step takes without
        self._num_steps += 1
        if size != self._size or self._num_steps >= _REVIEW_STEPS:
            self._decide(seats, size, propose_ns / times.plain_ns)
        if self._is_plain:
            self._num_plain += 1
            if self._num_plain < self._probe_after:
                return None
            self._num_plain, self._probe_after = 0, min(2 * self._probe_after, _LAST_PROBE)
            self._num_steps = _REVIEW_STEPS
            return self._probe(len(seats))
        self._num_plain += 1
        if self._num_plain % _PLAIN_STEPS == 0:
            return None
        return self._wanted.take(seats)

    def _probe(self, num_rows: int) -> Ints:
        self._num_probes += 1
        length = _PROBE_DRAFTS[self._num_probes % len(_PROBE_DRAFTS)]
        lengths: Ints = np.zeros(num_rows, np.int32)
        lengths[: _PROBE_TOKENS // length] = length
        return lengths

    def _decide(self, seats: npt.NDArray[np.intp], size: int, propose: float) -> None:
        self._size, self._num_steps = size, 0
        self._num_reviews += 1
        known = [each for each, times in self._times.items() if times.num_drafted >= _NUM_TRIALS]
        if not known:
            self._wanted[seats] = self._probe(len(seats))
            return
        fixed, cost = self._times[min(known, key=lambda each: abs(each - size))].costs
        prior = _PRIOR_TRIALS * self.acceptance
        alpha = (self._accepted[seats] + prior) / (self._tried[seats] + _PRIOR_TRIALS)
        gains = np.minimum(alpha, 0.99)[:, None] ** np.arange(1, MAX_DRAFT + 1)
        ordered = np.sort(gains, axis=None)[::-1]
        num_tokens = np.arange(1, len(ordered) + 1)
        rates = (len(seats) + np.cumsum(ordered)) / (1 + propose + fixed + cost * num_tokens)
        best = int(rates.argmax())
        was_plain, self._is_plain = self._is_plain, bool(rates[best] <= _MARGIN * len(seats))
        if self._is_plain:
            if not was_plain:
                self._num_plain = 0
            return
        if was_plain:
            self._num_plain, self._probe_after = 0, _FIRST_PROBE
        wanted = np.count_nonzero(gains >= ordered[best], axis=1)
        if self._num_reviews % _LONE_REVIEWS == 0:
            wanted = np.maximum(wanted, 2)
        self._wanted[seats] = wanted


def _size_of(num_rows: int) -> int:
    """Return a number for batches that take about equally long: a quarter of a power of two."""
    return round(4 * log2(num_rows))
