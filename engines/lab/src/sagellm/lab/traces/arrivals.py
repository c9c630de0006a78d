"""When requests arrive: a renewal process with gamma-distributed gaps."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from sagellm.core import ConfigError


def arrival_times(rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Yield ascending arrival times in seconds, the first at 0, on average `rate` per second.

    Gaps are gamma distributed with shape `burstiness` and mean 1 ÷ rate: 1 is a Poisson process, less is
    bursty (coefficient of variation 1 ÷ √burstiness), more is regular. An infinite rate sends all at once.
    """
    if not rate > 0:
        raise ConfigError(f"rate is {rate}; it must be above 0, or inf to send all requests at once")
    if not 0 < burstiness < float("inf"):
        raise ConfigError(f"burstiness is {burstiness}; it must be above 0 (1 is Poisson)")
    rng = Random(f"arrivals {seed}")
    now = 0.0
    while True:
        yield now
        now += rng.gammavariate(burstiness, 1 / (rate * burstiness)) if rate != float("inf") else 0.0
