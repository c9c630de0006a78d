"""Which blocks are hot, warm or cold, by thresholds that follow the load."""

from __future__ import annotations

from typing import Literal, TypeAlias

from sagellm.core.errors import ConfigError

Temperature: TypeAlias = Literal["cold", "warm", "hot"]
COLDEST_FIRST: dict[Temperature, int] = {"cold": 0, "warm": 1, "hot": 2}

_HOT_IDLE_S = 1.0
_NUM_OBSERVED = 512
"""Observations between updates of a threshold."""

_HOT_QUANTILE, _WARM_QUANTILE, _COLD_QUANTILE = 0.8, 0.3, 0.95
_STEP = 0.5
"""Step of a threshold towards the observed value, as a fraction."""


class HotColdClassifier:
    """Rates how hot a block is by its idle time and its frequency, in uses per second.

    The first match counts: idle < 1 s is hot; a frequency of at least `hot_frequency_threshold` is hot;
    idle > `cold_timeout_s` is cold; a frequency below `warm_frequency_threshold` and idle for more than half
    of the timeout is cold; everything else is warm.

    If `adapts`, the thresholds are starting values: after every 512 observations they move half
    way to these targets: the timeout to the 95th percentile of the time between two uses of a block, the
    frequencies to the 80th and 30th percentiles among blocks considered for eviction. So they divide the
    candidates at any load.
    """

    def __init__(
        self,
        *,
        hot_frequency_threshold: float = 0.1,
        warm_frequency_threshold: float = 0.01,
        cold_timeout_s: float = 300.0,
        adapts: bool = True,
    ) -> None:
        if not 0 <= warm_frequency_threshold <= hot_frequency_threshold:
            raise ConfigError(
                f"warm_frequency_threshold is {warm_frequency_threshold!r} and hot_frequency_threshold "
                f"{hot_frequency_threshold!r}; they must be at least 0, the second one not below the first"
            )
        if not cold_timeout_s > 0:
            raise ConfigError(f"cold_timeout_s is {cold_timeout_s!r}; it must be above 0")
        self.hot_frequency_threshold = hot_frequency_threshold
        self.warm_frequency_threshold = warm_frequency_threshold
        self.cold_timeout_s = cold_timeout_s
        self._adapts = adapts
        self._gaps_s: list[float] = []
        self._frequencies: list[float] = []

    def classify(self, idle_s: float, frequency: float) -> Temperature:
        """Apply the rules in order."""
        if idle_s < _HOT_IDLE_S or frequency >= self.hot_frequency_threshold:
            return "hot"
        if idle_s > self.cold_timeout_s:
            return "cold"
        if frequency < self.warm_frequency_threshold and idle_s > self.cold_timeout_s / 2:
            return "cold"
        return "warm"

    def observe_gap(self, gap_s: float) -> None:
        """Record the time between two uses of a block."""
        if not self._adapts:
            return
        self._gaps_s.append(gap_s)
        if len(self._gaps_s) >= _NUM_OBSERVED:
            timeout_s = max(2 * _HOT_IDLE_S, _quantile(sorted(self._gaps_s), _COLD_QUANTILE))
            self.cold_timeout_s += _STEP * (timeout_s - self.cold_timeout_s)
            self._gaps_s = []

    def observe_frequency(self, frequency: float) -> None:
        """Record the frequency of a block that was chosen for eviction, or spared when considered."""
        if not self._adapts:
            return
        self._frequencies.append(frequency)
        if len(self._frequencies) >= _NUM_OBSERVED:
            ascending = sorted(self._frequencies)
            hot, warm = _quantile(ascending, _HOT_QUANTILE), _quantile(ascending, _WARM_QUANTILE)
            self.hot_frequency_threshold += _STEP * (hot - self.hot_frequency_threshold)
            self.warm_frequency_threshold += _STEP * (warm - self.warm_frequency_threshold)
            self._frequencies = []


def _quantile(ascending: list[float], share: float) -> float:
    return ascending[min(len(ascending) - 1, int(share * len(ascending)))]
