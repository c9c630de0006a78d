"""Who comes back and when: a mixture cure model of conversations, learnt online."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_Floats = NDArray[np.float64]

TYPICAL_GAP_S = 120.0
"""Between two turns, before anything was learnt."""

_LOG_TYPICAL = math.log(TYPICAL_GAP_S)
_NUM_AGES = 40
_AGES: _Floats = np.concatenate([[0.0], np.geomspace(0.06, 40.0, _NUM_AGES)])  # in a conversation's own pace
_WIDTHS: _Floats = np.diff(_AGES)
_LOG_FIRST, _LOG_STEP = math.log(0.06), math.log(40.0 / 0.06) / (_NUM_AGES - 1)
_NUM_CHANCES = 64
_NUM_FEATURES, _NUM_PACE = 16, 3
_MAX_LOGIT, _MAX_HALVINGS = 30.0, 8


class Turn(NamedTuple):
    """What is known of one turn of a conversation when it comes."""

    time_s: float
    number: int  # 1 for the first
    log_gaps: float  # sum of the logarithms of the gaps so far, in seconds
    gap_s: float | None  # since the turn before
    new: float  # length of what is new in it, in any unit
    length: float  # of the whole prompt
    known: float  # of what it has in common with what came before


class ReturnModel:
    """Predicts, for each turn, the chance that another one follows, and when.

    A conversation goes on with probability π (logistic in what is known of its turn) after a gap of
    scale · u seconds; its scale is that of its own gaps so far, u has one distribution for all (a
    histogram). Turns that nothing has followed yet are weighted by the chance that something will,
    as in the EM algorithm for cure models (V. T. Farewell, Biometrics 38, 1982).

    What room is worth: max over T of P(back before T) ÷ E[time until back or T], the Gittins index of
    a renewal process (J. C. Gittins, 1979), in returns per second.
    """

    def __init__(self, *, window: int = 8192, refit_every: int = 100) -> None:
        self._window, self._refit_every = window, refit_every
        self._num_turns = self._num_fitted = 0
        self._features = np.zeros((window, _NUM_FEATURES))
        self._pace = np.zeros((window, _NUM_PACE))
        self._times = np.zeros(window)
        self._gaps = np.full(window, np.nan)  # until the next turn; not a number while there is none
        self._weights = np.zeros(_NUM_FEATURES)
        self._weights[0] = -0.5
        self._pace_prior = np.array([_LOG_TYPICAL, 0.8, 0.0])
        self._pace_weights = self._pace_prior.copy()
        density = np.exp(-(np.log(_AGES[:-1] + _WIDTHS / 2) ** 2) / 2) * _WIDTHS / (_AGES[:-1] + _WIDTHS / 2)
        self._density: _Floats = density / density.sum()
        self._table = self._tabulate()

    def add(self, turn: Turn) -> tuple[int, float, float]:
        """Take a turn; returns its number here, the chance of another, and the scale of the gap (s)."""
        if self._num_turns - self._num_fitted >= self._refit_every:
            self._fit(turn.time_s)
        index = self._num_turns
        self._num_turns += 1
        slot = index % self._window
        mean = (turn.log_gaps + 2 * _LOG_TYPICAL) / (turn.number + 1) - _LOG_TYPICAL
        self._features[slot] = features = _features_of(turn)
        self._pace[slot] = pace = (1.0, mean, float(turn.number == 1))
        self._times[slot] = turn.time_s
        self._gaps[slot] = np.nan
        logit = min(_MAX_LOGIT, max(-_MAX_LOGIT, float(self._weights @ features)))
        chance = 1 / (1 + math.exp(-logit))
        return index, chance, math.exp(float(self._pace_weights @ pace))

    def go_on(self, index: int, time_s: float) -> None:
        """Note that another turn followed."""
        if index > self._num_turns - self._window:
            slot = index % self._window
            self._gaps[slot] = max(1e-3, time_s - self._times[slot])

    def index(self, chance: float, scale_s: float, age_s: float) -> float:
        """Return what its room earns, in returns per second; before the first fit the oldest earns least."""
        if not self._num_fitted:
            return -age_s
        age = age_s / scale_s
        column = 0 if age < 0.06 else min(_NUM_AGES - 1, int((math.log(age) - _LOG_FIRST) / _LOG_STEP) + 1)
        return self._table[min(_NUM_CHANCES - 1, int(chance * _NUM_CHANCES))][column] / scale_s

    def details(self) -> dict[str, float]:
        """Return what was learnt, as figures."""
        size = min(self._num_turns, self._window)
        num_returned = int(np.count_nonzero(~np.isnan(self._gaps[:size])))
        return {
            "num_turns": float(self._num_turns),
            "returned_share": num_returned / size if size else 0.0,
            "typical_gap_s": math.exp(float(self._pace_weights[0])),
        }

    def _fit(self, now_s: float) -> None:
        """Learn from the turns of the window. A few milliseconds."""
        self._num_fitted = self._num_turns
        size = min(self._num_turns, self._window)
        features, pace, gaps = self._features[:size], self._pace[:size], self._gaps[:size]
        has_returned = ~np.isnan(gaps)
        self._fit_pace(pace[has_returned], np.log(gaps[has_returned]))
        waited_s = np.where(has_returned, gaps, now_s - self._times[:size])
        ages = np.clip(waited_s / np.exp(pace @ self._pace_weights), 0.0, _AGES[-1])
        columns = np.clip(np.searchsorted(_AGES, ages, side="right") - 1, 0, _NUM_AGES - 1)
        into = np.minimum((ages - _AGES[columns]) / _WIDTHS[columns], 1.0)
        for _ in range(3):
            chances = _logistic(features @ self._weights)
            passed = np.concatenate([[0.0], np.cumsum(self._density)])
            gone = np.clip(passed[columns] + into * self._density[columns], 0.0, 1.0)
            expected = np.where(has_returned, 1.0, chances * (1 - gone) / (1 - chances * gone + 1e-12))
            self._fit_density(columns, into, expected, has_returned)
            self._fit_weights(features, expected)
        self._table = self._tabulate()

    def _fit_pace(self, pace: _Floats, log_gaps: _Floats) -> None:
        """Least squares around the prior."""
        normal = pace.T @ pace + np.diag([20.0, 5.0, 5.0])
        residual = log_gaps - pace @ self._pace_prior
        self._pace_weights = self._pace_prior + np.linalg.solve(normal, pace.T @ residual)

    def _fit_density(
        self, columns: NDArray[np.intp], into: _Floats, expected: _Floats, has_returned: NDArray[np.bool_]
    ) -> None:
        """Hazard by age: returns ÷ expected time at risk, around the hazard so far."""
        returns = np.bincount(columns[has_returned], minlength=_NUM_AGES)
        counts = np.bincount(columns, weights=expected, minlength=_NUM_AGES)
        beyond = np.cumsum(counts[::-1])[::-1] - counts
        at_risk = beyond + np.bincount(columns, weights=expected * into, minlength=_NUM_AGES)
        left = np.maximum(1 - np.concatenate([[0.0], np.cumsum(self._density)])[:-1], 1e-9)
        prior = np.clip(np.maximum(self._density, 1e-9) / left, 0.0, 3.0)
        hazard = (returns + 5 * prior) / (at_risk + 5)
        staying = np.exp(-np.cumsum(np.concatenate([[0.0], hazard])))
        density = staying[:-1] - staying[1:]
        self._density = density / density.sum()

    def _fit_weights(self, features: _Floats, expected: _Floats) -> None:
        """Two Newton steps of a ridge logistic regression, each halved until it gains: they may overshoot."""
        loss = _loss(features, expected, self._weights)
        for _ in range(2):
            chances = _logistic(features @ self._weights)
            gradient = features.T @ (expected - chances) - self._weights
            curvature = (features * (chances * (1 - chances))[:, None]).T @ features + np.eye(_NUM_FEATURES)
            step = np.linalg.solve(curvature, gradient)
            for _ in range(_MAX_HALVINGS):
                found = _loss(features, expected, self._weights + step)
                if found < loss:
                    self._weights, loss = self._weights + step, found
                    break
                step = step / 2

    def _tabulate(self) -> list[list[float]]:
        """Tabulate the index by chance and age, in units of a conversation's own pace."""
        chances = (np.arange(_NUM_CHANCES) + 0.5) / _NUM_CHANCES
        passed = np.concatenate([[0.0], np.cumsum(self._density)])
        staying = 1 - chances[:, None] * passed  # (chances, ages + 1)
        room = (staying[:, :-1] + staying[:, 1:]) / 2 * _WIDTHS
        best = np.zeros((_NUM_CHANCES, _NUM_AGES))
        for age in range(_NUM_AGES):
            earned = (staying[:, age, None] - staying[:, age + 1 :]) / np.cumsum(room[:, age:], axis=1)
            best[:, age] = earned.max(axis=1)
        table: list[list[float]] = best.tolist()
        return table


def _logistic(values: _Floats) -> _Floats:
    return 1 / (1 + np.exp(-np.clip(values, -_MAX_LOGIT, _MAX_LOGIT)))


def _loss(features: _Floats, expected: _Floats, weights: _Floats) -> float:
    """Return what the regression minimises."""
    logits = features @ weights
    return float(np.logaddexp(0.0, logits).sum() - expected @ logits + weights @ weights / 2)


def _features_of(turn: Turn) -> list[float]:
    """Describe a turn: how far the conversation is, how fast, how long, and how much of it is new."""
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
