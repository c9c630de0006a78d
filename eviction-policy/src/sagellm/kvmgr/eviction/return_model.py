"""Which conversations come back, and when: a mixture cure model, learnt online."""

from __future__ import annotations

import copy
import math
from bisect import bisect_right
from collections.abc import Iterator
from operator import mul
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

_Floats = NDArray[np.float64]

TYPICAL_GAP_S = 120.0
"""The gap between two turns, before anything has been learnt."""

NUM_CHANCES = 32
"""The number of chances for which the worth of cache room is tabulated."""

_LOG_TYPICAL = math.log(TYPICAL_GAP_S)
_NUM_AGES = 48
_AGES: _Floats = np.concatenate([[0.0], np.geomspace(0.06, 200.0, _NUM_AGES)])  # in units of the scale
_WIDTHS: _Floats = np.diff(_AGES)
_EDGES: list[float] = _AGES.tolist()
_LATER = np.tri(_NUM_AGES + 1, k=-1, dtype=bool).T[:-1]  # (ages, ages + 1): whether the second is later
_NUM_FEATURES, _NUM_PACE = 16, 3
_MAX_LOGIT, _MAX_STEP, _LEAST_CURVATURE = 30.0, 1.0, 0.02
_ROWS_A_SLICE, _CHANCES_A_SLICE = 256, 4
_FEW_TURNS = 2048
_LEAST_SPAN_S = 1e-3

_PRIOR: _Floats = np.zeros(_NUM_FEATURES)
_PRIOR[[0, 3, 4]] = -0.6, 0.56, 0.5
"""Of the weights: a first turn is continued in two cases of five, a fifth in three of four."""

_PRIOR_TURNS = 2.0
"""The weight of that prior, in turns with a feature of 1."""


class Worth(NamedTuple):
    """What cache room earns, in returns per second, while the age (s) of its turn is in a range."""

    returns_per_s: float
    from_s: float
    to_s: float


class TurnFacts(NamedTuple):
    """What is known about a turn of a conversation when it arrives."""

    time_s: float
    number: int  # 1 for the first
    log_gaps: float  # sum of the logarithms of the gaps so far, in seconds
    gap_s: float | None  # since the previous turn
    new: float  # length of its new part, in any unit
    length: float  # of the whole prompt
    known: float  # of the part it shares with earlier prompts


class ReturnModel:
    """Predicts, for each turn, the chance that another one follows, and when.

    A conversation continues with probability π (logistic in what is known about its turn) after a gap of
    scale · u seconds; its scale is that of its own gaps so far, u has one distribution for all (a
    histogram). Turns not followed yet are weighted by the probability that they will be,
    as in the EM algorithm for cure models (V. T. Farewell, Biometrics 38, 1982).

    The worth of cache room: max over T of P(back before T) ÷ E[time until back or T], the Gittins index of
    a renewal process (J. C. Gittins, 1979), in returns per second.

    Learning is continuous, in rounds over the last `window` turns: with every fourth turn, at first
    every second, a slice of 256 of them is processed, and each round ends with one step of EM. A slice
    takes about 0.1 ms, and any other call at most a few µs.
    """

    def __init__(self, *, window: int = 8192) -> None:
        self.version = 0  # of the answers of `worth`
        self._window = window
        self._num_turns = 0
        self._now_s = 0.0
        self._features = np.zeros((window, _NUM_FEATURES))
        self._pace = np.zeros((window, _NUM_PACE))
        self._times = np.zeros(window)
        self._gaps = np.full(window, np.nan)  # until the next turn; NaN if there is none yet
        self._weights = _PRIOR.copy()
        self._pace_prior = np.array([_LOG_TYPICAL, 0.8, 0.0])
        self._pace_weights = self._pace_prior.copy()
        density = np.exp(-(np.log(_AGES[:-1] + _WIDTHS / 2) ** 2) / 2) * _WIDTHS / (_AGES[:-1] + _WIDTHS / 2)
        self._density: _Floats = density / density.sum()
        self._table = [row for rows in self._tabulate() for row in rows]
        self._weight_list: list[float] = self._weights.tolist()
        self._pace_list: list[float] = self._pace_weights.tolist()
        self._learning = self._learn()

    def copy(self) -> Self:
        """Return one that knows the same and learns by itself."""
        copied = copy.copy(self)
        for name in ("_features", "_pace", "_times", "_gaps"):
            setattr(copied, name, getattr(self, name).copy())
        copied._learning = copied._learn()
        return copied

    def add(self, turn: TurnFacts) -> tuple[int, float, float]:
        """Add a turn; return its index here, the chance of another, and the scale of the gap (s)."""
        index = self._num_turns
        self._num_turns += 1
        self._now_s = turn.time_s
        slot = index % self._window
        mean = (turn.log_gaps + 2 * _LOG_TYPICAL) / (turn.number + 1) - _LOG_TYPICAL
        features, pace = _features_of(turn), (1.0, mean, float(turn.number == 1))
        self._features[slot], self._pace[slot] = features, pace
        self._times[slot] = turn.time_s
        self._gaps[slot] = np.nan
        if index % (2 if index < _FEW_TURNS else 4) == 0:
            next(self._learning)
        logit = min(_MAX_LOGIT, max(-_MAX_LOGIT, sum(map(mul, self._weight_list, features))))
        scale = math.exp(min(_MAX_LOGIT, max(-_MAX_LOGIT, sum(map(mul, self._pace_list, pace)))))
        return index, 1 / (1 + math.exp(-logit)), scale

    def go_on(self, index: int, time_s: float) -> None:
        """Record that another turn followed."""
        if index > self._num_turns - self._window:
            slot = index % self._window
            self._gaps[slot] = max(1e-3, time_s - self._times[slot])

    def worth(self, chance: float, scale_s: float, age_s: float) -> Worth:
        """Return what the room of a turn earns, in returns per second, and the ages for which this holds."""
        column = min(_NUM_AGES - 1, bisect_right(_EDGES, max(0.0, age_s) / scale_s) - 1)
        index = self._table[min(NUM_CHANCES - 1, int(chance * NUM_CHANCES))][column] / scale_s
        from_s = min(age_s, _EDGES[column] * scale_s) if column else -math.inf
        to_s = math.inf
        if column < _NUM_AGES - 1:
            to_s = max(age_s + _LEAST_SPAN_S, _EDGES[column + 1] * scale_s)
        return Worth(index, from_s, to_s)

    def details(self) -> dict[str, float]:
        """Return the learnt parameters as numbers."""
        size = min(self._num_turns, self._window)
        num_returned = int(np.count_nonzero(~np.isnan(self._gaps[:size])))
        return {
            "num_turns": float(self._num_turns),
            "returned_share": num_returned / size if size else 0.0,
            "typical_gap_s": math.exp(float(self._pace_weights[0])),
        }

    def _learn(self) -> Iterator[None]:
        """Learn forever, one slice per step of the generator."""
        while True:
            sums = _Sums()
            begin = 0
            while begin < (size := min(self._num_turns, self._window)):
                self._add_up(sums, slice(begin, min(begin + _ROWS_A_SLICE, size)))
                begin += _ROWS_A_SLICE
                yield
            for _ in self._improve(sums):
                yield
            table: list[list[float]] = []
            for rows in self._tabulate():
                table += rows
                yield
            self._table = table
            self.version += 1

    def _add_up(self, sums: _Sums, rows: slice) -> None:
        """Add some turns to the sums under the current model."""
        features, pace, gaps = self._features[rows], self._pace[rows], self._gaps[rows]
        has_returned = ~np.isnan(gaps)
        known = pace[has_returned]
        sums.pace_normal += known.T @ known
        sums.pace_moment += known.T @ (np.log(gaps[has_returned]) - known @ self._pace_prior)
        waited_s = np.where(has_returned, gaps, self._now_s - self._times[rows])
        ages = np.clip(waited_s / np.exp(pace @ self._pace_weights), 0.0, _AGES[-1])
        columns = np.clip(np.searchsorted(_AGES, ages, side="right") - 1, 0, _NUM_AGES - 1)
        into = np.minimum((ages - _AGES[columns]) / _WIDTHS[columns], 1.0)
        chances = 1 / (1 + np.exp(-np.clip(features @ self._weights, -_MAX_LOGIT, _MAX_LOGIT)))
        passed = np.concatenate([[0.0], np.cumsum(self._density)])
        gone = np.clip(passed[columns] + into * self._density[columns], 0.0, 1.0)
        expected = np.where(has_returned, 1.0, chances * (1 - gone) / (1 - chances * gone + 1e-12))
        sums.returns += np.bincount(columns[has_returned], minlength=_NUM_AGES)
        sums.counts += np.bincount(columns, weights=expected, minlength=_NUM_AGES)
        sums.into += np.bincount(columns, weights=expected * into, minlength=_NUM_AGES)
        sums.gradient += features.T @ (expected - chances)
        sums.curvature += (
            features * np.maximum(_LEAST_CURVATURE, chances * (1 - chances))[:, None]
        ).T @ features

    def _improve(self, sums: _Sums) -> Iterator[None]:
        """Take one step of EM, in three slices, with a bound on the length of its Newton step."""
        normal = sums.pace_normal + np.diag([20.0, 5.0, 5.0])
        self._pace_weights = self._pace_prior + np.linalg.solve(normal, sums.pace_moment)
        self._pace_list = self._pace_weights.tolist()
        yield
        self._improve_density(sums)
        yield
        curvature = sums.curvature + _PRIOR_TURNS * np.eye(_NUM_FEATURES)
        gradient = sums.gradient - _PRIOR_TURNS * (self._weights - _PRIOR)
        step = np.linalg.solve(curvature, gradient)
        self._weights = self._weights + step * min(1.0, _MAX_STEP / max(1e-9, float(np.abs(step).max())))
        self._weight_list = self._weights.tolist()
        yield

    def _improve_density(self, sums: _Sums) -> None:
        """Hazard by age: returns ÷ expected time at risk, around the hazard so far."""
        at_risk = np.cumsum(sums.counts[::-1])[::-1] - sums.counts + sums.into
        left = np.maximum(1 - np.concatenate([[0.0], np.cumsum(self._density)])[:-1], 1e-9)
        prior = np.clip(np.maximum(self._density, 1e-9) / left, 0.0, 3.0)
        hazard = (sums.returns + 5 * prior) / (at_risk + 5)
        staying = np.exp(-np.cumsum(np.concatenate([[0.0], hazard])))
        density = staying[:-1] - staying[1:]
        self._density = density / density.sum()

    def _tabulate(self) -> Iterator[list[list[float]]]:
        """Yield the rows of the table by chance and age, several at a time; time is in units of the scale."""
        passed = np.concatenate([[0.0], np.cumsum(self._density)])
        for begin in range(0, NUM_CHANCES, _CHANCES_A_SLICE):
            chances = (np.arange(begin, begin + _CHANCES_A_SLICE) + 0.5) / NUM_CHANCES
            staying = 1 - chances[:, None] * passed  # (chances, ages + 1)
            room = np.zeros_like(staying)
            room[:, 1:] = np.cumsum((staying[:, :-1] + staying[:, 1:]) / 2 * _WIDTHS, axis=1)
            earned = staying[:, :-1, None] - staying[:, None, :]  # (chances, from, to)
            taken = np.where(_LATER, room[:, None, :] - room[:, :-1, None], np.inf)
            rows: list[list[float]] = (earned / taken).max(axis=2).tolist()
            yield rows


class ReturnModels:
    """Two models: one of the turns of conversations, one of the uses of their shared beginnings."""

    def __init__(self, *, window: int = 8192) -> None:
        self._turns, self._uses = ReturnModel(window=window), ReturnModel(window=max(1, window // 4))

    def learn_from(self, other: ReturnModels) -> None:
        """Know what another pair knows, from here on apart from it."""
        self._turns, self._uses = other._turns.copy(), other._uses.copy()

    @property
    def version(self) -> int:
        """Changes whenever the answers of `worth` do."""
        return self._turns.version + self._uses.version

    def of(self, *, is_shared: bool) -> ReturnModel:
        """Return the model of conversations or the one of shared beginnings."""
        return self._uses if is_shared else self._turns

    def worth(self, chance: float, scale_s: float, age_s: float, *, is_shared: bool) -> Worth:
        """Return what the room of a turn, or of a shared beginning, earns, as ReturnModel does."""
        return self.of(is_shared=is_shared).worth(chance, scale_s, age_s)

    def details(self) -> dict[str, float]:
        """Return the parameters learnt about conversations, as numbers."""
        return self._turns.details()


class _Sums:
    """The sums of one round over the turns."""

    def __init__(self) -> None:
        self.pace_normal = np.zeros((_NUM_PACE, _NUM_PACE))
        self.pace_moment = np.zeros(_NUM_PACE)
        self.returns = np.zeros(_NUM_AGES)
        self.counts = np.zeros(_NUM_AGES)  # all turns, by the chance that they come back
        self.into = np.zeros(_NUM_AGES)  # their progress within the age interval
        self.gradient = np.zeros(_NUM_FEATURES)
        self.curvature = np.zeros((_NUM_FEATURES, _NUM_FEATURES))


def _features_of(turn: TurnFacts) -> list[float]:
    """Describe a turn: how far and how fast the conversation is, how long, and how new."""
    first, second = float(turn.number == 1), float(turn.number == 2)
    lag = 0.0 if turn.gap_s is None else math.log(max(turn.gap_s, 1.0)) - _LOG_TYPICAL
    new, length = math.log2(turn.new + 1), math.log2(turn.length + 1)
    return [
        1.0,
        first,
        second,
        math.log(turn.number),
        min(turn.number, 12) / 4,
        lag,
        lag * lag,
        new,
        length,
        new * new / 4,
        new * first,
        length * first,
        turn.known / turn.length,
        float(turn.length <= 2),
        float(turn.length <= 4),
        float(turn.length <= 8),
    ]
