"""What is compared: values of each request, and how they become one figure of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from sagellm.core import ConfigError, nearest

Column = npt.NDArray[np.float64]
"""A value of each request of a trace, in its order; NaN where a request has none."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A figure of a run: Σ `column` ÷ Σ `over`, or a percentile of the column.

    Without `over` it is the mean over the requests that have a value.
    """

    name: str
    title: str
    column: str
    over: str | None = None
    percentile: float | None = None
    unit: Literal["s", "ms", "%"] = "s"
    is_more_better: bool = False

    @property
    def is_share(self) -> bool:
        """Whether it lies between 0 and 1, so that differences are in points, not relative."""
        return self.unit == "%"

    def of(self, columns: dict[str, Column]) -> float | None:
        """Return the figure of a run; None if no request has a value."""
        values = columns[self.column]
        if self.percentile is not None:
            known = values[~np.isnan(values)]
            return float(np.percentile(known, self.percentile)) if len(known) else None
        over = np.isfinite(values).astype(float) if self.over is None else columns[self.over]
        total = np.nansum(np.where(np.isnan(values), 0.0, over))
        return float(np.nansum(values) / total) if total else None


SAVED = Metric(
    name="saved", title="prompt tokens saved", column="saved", over="prompt", unit="%", is_more_better=True
)

SERVING_METRICS = (
    Metric(name="ttft", title="mean TTFT", column="ttft_s"),
    Metric(name="ttft_p99", title="P99 TTFT", column="ttft_s", percentile=99),
    Metric(name="tpot", title="mean TPOT", column="tpot_s", unit="ms"),
    Metric(name="latency", title="mean latency", column="latency_s"),
    Metric(name="wait", title="mean wait", column="wait_s"),
    Metric(name="good", title="good requests", column="good", unit="%", is_more_better=True),
    SAVED,
)
"""Those of simulated serving; the first is the headline unless another is chosen."""

CACHE_METRICS = (SAVED,)
"""Those of a replay through the cache alone."""

COLUMNS = tuple(
    dict.fromkeys(name for one in SERVING_METRICS for name in (one.column, one.over) if name is not None)
)
"""Names of the values of each request."""


def headline_of(name: str | None, metrics: tuple[Metric, ...]) -> Metric:
    """Return the metric that decides; None is the first. Raises ConfigError if there is no such one."""
    if name is None:
        return metrics[0]
    for each in metrics:
        if each.name == name:
            return each
    if any(each.name == name for each in SERVING_METRICS):
        raise ConfigError(
            f"--headline {name} is of serving, which is simulated with --cost FILE; give that too"
        )
    known = [each.name for each in metrics]
    raise ConfigError(f"--headline is {name!r}; possible are {', '.join(known)}.{nearest(name, known)}")
