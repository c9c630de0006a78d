"""Where the time of steps goes, by operation, and how close each comes to the machine's limits."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, cast, get_args

import numpy as np

from sagellm.core import KVLayout, ModelGeometry
from sagellm.core.protocols.forward import Operation, OperationWeights
from sagellm.engines.metrics.limits import Rate, peak_rate, read_bandwidth
from sagellm.engines.worker.work import OperationWork, WorkCounts, work_by_operation

StepKind = Literal["decode", "prefill", "mixed"]

PARTS = ("schedule", "copy", "read", "write", "prepare", *get_args(Operation), "forward", "sample", "advance")
"""Parts of a step: spans of its trace, and operations, whose time is not that of `forward`."""

_NUM_RECENT = 4096
"""Steps of a kind that medians are taken of."""


@dataclass(frozen=True, kw_only=True)
class ProfiledModel:
    """What the work of a model's operations follows from."""

    geometry: ModelGeometry
    layout: KVLayout
    weights: Mapping[Operation, OperationWeights]
    dtype: str

    def dtype_of(self, operation: Operation) -> str:
        """Return the number format in which an operation multiplies."""
        if operation in self.weights:
            return self.weights[operation].dtype
        return "int8" if operation == "attend" and self.layout.group.dtype == "int8" else self.dtype


@dataclass(frozen=True, kw_only=True)
class ProfileLimits:
    """What the machine can do at most: bytes read, and operations in each number format."""

    read: Rate
    peaks: Mapping[str, Rate]

    def best(self, other: ProfileLimits) -> ProfileLimits:
        """Return the higher of both measurements of each rate."""
        peaks = {name: max(rate, other.peaks[name], key=_per_s) for name, rate in self.peaks.items()}
        return ProfileLimits(read=max(self.read, other.read, key=_per_s), peaks=peaks)


@dataclass(frozen=True, kw_only=True)
class PartFigures:
    """A part of the steps of one kind. Times, bytes and FLOPs are those of a step, means unless said.

    `limit_share` is the roofline ratio, max(bytes ÷ bandwidth, FLOPs ÷ peak) ÷ time, of the times of all
    steps; above 1 if weights come from a cache. None: nothing is counted, or the weights' bytes are unknown.
    """

    name: str
    num_calls: int  # in all steps
    median_ms: float
    mean_ms: float
    share: float
    read_bytes: float | None = None  # weights and KV
    flops: float | None = None
    limited_by: Literal["reads", "products"] | None = None
    limit_share: float | None = None


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """The steps of one kind, their parts, and the whole as a part."""

    kind: StepKind
    num_steps: int
    num_sequences: float  # these three in a step, means
    num_tokens: float
    num_kv_tokens: float
    parts: Sequence[PartFigures]
    whole: PartFigures


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Steps by kind, and the limits that they are set against."""

    steps: Sequence[StepFigures]
    limits: ProfileLimits


class Times:
    """How long something took in each step."""

    def __init__(self) -> None:
        self.num_calls = self.total_ns = 0
        self.recent_ns: deque[int] = deque(maxlen=_NUM_RECENT)

    def add(self, num_calls: int, duration_ns: int) -> None:
        """Add what one step spent on it."""
        self.num_calls += num_calls
        self.total_ns += duration_ns
        self.recent_ns.append(duration_ns)


@dataclass(eq=False)
class StepSums:
    """Sums over the steps of a kind."""

    counts: WorkCounts = field(default_factory=WorkCounts)
    whole: Times = field(default_factory=Times)
    parts: dict[str, Times] = field(default_factory=dict)

    def add(self, name: str, num_calls: int, duration_ns: int) -> None:
        """Add a part of one step."""
        self.parts.setdefault(name, Times()).add(num_calls, duration_ns)


class _Limit(NamedTuple):
    """The least time of some work, by what is read and by what is multiplied."""

    read_s: float
    product_s: float
    work: OperationWork


def _per_s(rate: Rate) -> float:
    return rate.per_s


def measured_limits(model: ProfiledModel, device: str) -> ProfileLimits:
    """Measure what limits a model's operations. All cores are busy for about two seconds."""
    operations: tuple[Operation, ...] = get_args(Operation)
    formats = dict.fromkeys(map(model.dtype_of, operations))
    return ProfileLimits(
        read=read_bandwidth(device), peaks={each: peak_rate(device, each) for each in formats}
    )


def profile_of(steps: Mapping[StepKind, StepSums], model: ProfiledModel, limits: ProfileLimits) -> Profile:
    """Return the figures of steps, set against the limits."""
    kinds: tuple[StepKind, ...] = get_args(StepKind)
    figures = [_figures(kind, steps[kind], model, limits) for kind in kinds if kind in steps]
    return Profile(steps=figures, limits=limits)


def _figures(kind: StepKind, sums: StepSums, model: ProfiledModel, limits: ProfileLimits) -> StepFigures:
    counts = sums.counts
    least = {
        name: _Limit(
            work.read_bytes / limits.read.per_s, work.flops / limits.peaks[model.dtype_of(name)].per_s, work
        )
        for name, work in work_by_operation(counts, model.geometry, model.layout, model.weights).items()
        if name == "attend" or name in model.weights
    }
    whole = None
    if model.weights:
        read_s, product_s, work = zip(*least.values(), strict=True)
        whole = _Limit(sum(read_s), sum(product_s), OperationWork(*map(sum, zip(*work, strict=True))))
    return StepFigures(
        kind=kind,
        num_steps=counts.num_steps,
        num_sequences=counts.num_sequences / counts.num_steps,
        num_tokens=counts.num_tokens / counts.num_steps,
        num_kv_tokens=counts.num_kv_tokens / counts.num_steps,
        parts=[
            _part(name, sums.parts[name], sums, least.get(cast("Operation", name)))
            for name in (*PARTS, "rest")
            if name in sums.parts
        ],
        whole=_part("step", sums.whole, sums, whole),
    )


def _part(name: str, times: Times, sums: StepSums, least: _Limit | None) -> PartFigures:
    num_steps, total_ns = sums.whole.num_calls, max(times.total_ns, 1)
    part = PartFigures(
        name=name,
        num_calls=times.num_calls,
        median_ms=float(np.median(times.recent_ns)) / 1e6,
        mean_ms=times.total_ns / num_steps / 1e6,
        share=times.total_ns / max(sums.whole.total_ns, 1),
    )
    if least is None:
        return part
    return replace(
        part,
        read_bytes=least.work.read_bytes / num_steps,
        flops=least.work.flops / num_steps,
        limited_by="reads" if least.read_s >= least.product_s else "products",
        limit_share=max(least.read_s, least.product_s) * 1e9 / total_ns,
    )
