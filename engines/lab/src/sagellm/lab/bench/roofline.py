"""How close a run came to what the hardware can do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sagellm.engines.metrics.roofline import MFUResult, bandwidth_use, roofline_ratio

if TYPE_CHECKING:
    from sagellm.engines.metrics.limits import Limits
    from sagellm.engines.worker.work import WorkMetrics


@dataclass(frozen=True, kw_only=True)
class RooflineFigures:
    """How close a run came to the limits of its hardware.

    MFU = model FLOPs ÷ (time × peak FLOP/s). Bandwidth use = bytes that must be read (weights once per
    step, KV of the batch) ÷ (time × read bandwidth); weights that stay in a cache can bring it above 1.
    Roofline ratio = the larger of bytes ÷ bandwidth and FLOPs ÷ peak, ÷ time: the share of the limit.
    """

    mfu: float
    bandwidth_use: float
    roofline_ratio: float
    mfu_error: str | None = None  # why the MFU, and a roofline ratio as high, cannot be true


def roofline_figures(work: WorkMetrics, time_s: float, limits: Limits) -> RooflineFigures | None:
    """Compare the work of a run with the limits; None if nothing was computed."""
    if not work.flops or not work.read_bytes:
        return None
    reached = MFUResult(
        flops=work.flops,
        time_s=time_s,
        peak_flops_per_s=limits.peak_flops_per_s,
        peak_source=limits.peak_source,
    )
    return RooflineFigures(
        mfu=reached.mfu,
        bandwidth_use=bandwidth_use(work.read_bytes, time_s, limits.read_bandwidth_bytes_per_s),
        roofline_ratio=roofline_ratio(
            num_bytes=work.read_bytes,
            bandwidth_bytes_per_s=limits.read_bandwidth_bytes_per_s,
            flops=work.flops,
            peak_flops_per_s=limits.peak_flops_per_s,
            time_s=time_s,
        ),
        mfu_error=reached.error,
    )
