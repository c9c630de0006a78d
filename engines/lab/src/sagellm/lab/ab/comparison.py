"""What differs between two runs of one trace, metric by metric."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sagellm.lab.ab.bootstrap import BlockBootstrap, Difference, Estimate
from sagellm.lab.ab.metrics import Column, Metric


@dataclass(frozen=True, kw_only=True)
class Run:
    """What became of each request under one configuration."""

    name: str
    text: str
    columns: dict[str, Column] = field(repr=False)
    num_failed: int = 0
    error: str | None = None
    policies: str = ""  # of a configuration that changes nothing

    @property
    def label(self) -> str:
        """The name, and what the configuration changes, or is if it changes nothing."""
        return f"{self.name}: {self.text}" + (f" ({self.policies})" if self.policies else "")


@dataclass(frozen=True, kw_only=True)
class Change:
    """One metric under a and b, over the requests that have a value under both."""

    metric: Metric
    a: float | None
    b: float | None
    difference: Difference

    @property
    def shown(self) -> Estimate | None:
        """The difference that people read: points of a share, else relative."""
        return self.difference.absolute if self.metric.is_share else self.difference.relative


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One run beside `a`."""

    run: Run
    changes: list[Change]
    is_identical: bool  # every value of every request
    is_same_configuration: bool = False


def compare(
    a: Run, b: Run, metrics: tuple[Metric, ...], bootstrap: BlockBootstrap, *, is_same: bool = False
) -> Comparison:
    """Compare two runs; the intervals are those of the bootstrap."""
    return Comparison(
        run=b,
        changes=[change_of(a, b, metric, bootstrap) for metric in metrics],
        is_identical=all(
            np.array_equal(a.columns[name], b.columns[name], equal_nan=True) for name in a.columns
        ),
        is_same_configuration=is_same,
    )


def change_of(a: Run, b: Run, metric: Metric, bootstrap: BlockBootstrap) -> Change:
    """Compare two runs in one metric."""
    in_a, in_b = a.columns[metric.column], b.columns[metric.column]
    known = ~np.isnan(in_a) & ~np.isnan(in_b)
    if not known.any():
        return Change(metric=metric, a=None, b=None, difference=Difference(absolute=None, relative=None))
    paired = [dict(run.columns) for run in (a, b)]
    for columns in paired:
        columns[metric.column] = np.where(known, columns[metric.column], np.nan)
    value_a, value_b = (metric.of(columns) for columns in paired)
    if metric.percentile is not None:
        first, second = (columns[metric.column] for columns in paired)
        difference = bootstrap.percentiles(first, second, metric.percentile)
    else:
        over = known.astype(float) if metric.over is None else a.columns[metric.over]
        first, second, over = (np.where(known, each, 0.0) for each in (in_a, in_b, over))
        difference = bootstrap.means(first, second, over)
    return Change(metric=metric, a=value_a, b=value_b, difference=difference)
