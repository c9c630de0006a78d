"""What the hardware can do, measured in the same run as the figures compared with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sagellm.core import MFUResult, bandwidth_use

if TYPE_CHECKING:
    import torch

    from sagellm.engines.worker.work import WorkMetrics

_GEMM_ROWS = 512
_GEMM_SIZE = 2048
READ_BYTES = 1 << 30
"""Bytes read to measure the bandwidth: more than any cache holds."""

_NUM_RUNS = 5


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The peak and the read bandwidth, and how they were found."""

    peak_flops_per_s: float
    read_bandwidth_bytes_per_s: float
    peak_source: str


@dataclass(frozen=True, kw_only=True)
class RooflineFigures:
    """How close a run came to the limits of its hardware.

    MFU = model FLOPs ÷ (time × peak FLOP/s). Bandwidth use = bytes that must be read (weights once per
    step, KV of the batch) ÷ (time × read bandwidth); weights that stay in a cache can bring it above 1.
    """

    mfu: float
    bandwidth_use: float
    peak_gflops_per_s: float
    read_bandwidth_gbytes_per_s: float
    peak_source: str


def roofline_figures(
    before: WorkMetrics, after: WorkMetrics, time_s: float, limits: Limits
) -> RooflineFigures:
    """Compare the work between two readings with the limits."""
    flops, read_bytes = after.flops - before.flops, after.read_bytes - before.read_bytes
    reached = MFUResult(
        flops=flops,
        time_s=time_s,
        peak_flops_per_s=limits.peak_flops_per_s,
        peak_source=limits.peak_source,
    )
    return RooflineFigures(
        mfu=reached.mfu,
        bandwidth_use=bandwidth_use(read_bytes, time_s, limits.read_bandwidth_bytes_per_s),
        peak_gflops_per_s=limits.peak_flops_per_s / 1e9,
        read_bandwidth_gbytes_per_s=limits.read_bandwidth_bytes_per_s / 1e9,
        peak_source=limits.peak_source,
    )


def measure_limits(device: torch.device, dtype: torch.dtype) -> Limits:
    """Time torch's product of 512 rows and a sum over 1 GiB, the best of five each.

    The product is timed in the model's dtype and in float32, and the faster one is the peak: some CPUs
    multiply bfloat16 slowly.
    """
    import torch

    rates = {one: _gemm_rate(device, one) for one in dict.fromkeys((dtype, torch.float32))}
    fastest = max(rates, key=lambda one: rates[one])
    data = torch.zeros(READ_BYTES // 4, dtype=torch.float32, device=device)
    read_s = _best_s(lambda: data.sum(), device)
    name = str(fastest).removeprefix("torch.")
    return Limits(
        peak_flops_per_s=rates[fastest],
        read_bandwidth_bytes_per_s=data.nbytes / read_s,
        peak_source=f"torch's {name} product of {_GEMM_ROWS} rows, measured in this run",
    )


def _gemm_rate(device: torch.device, dtype: torch.dtype) -> float:
    import torch

    rows = torch.ones(_GEMM_ROWS, _GEMM_SIZE, dtype=dtype, device=device)
    weight = torch.ones(_GEMM_SIZE, _GEMM_SIZE, dtype=dtype, device=device)
    duration_s = _best_s(lambda: torch.nn.functional.linear(rows, weight), device)
    return 2 * _GEMM_ROWS * _GEMM_SIZE * _GEMM_SIZE / duration_s


def _best_s(run: Callable[[], torch.Tensor], device: torch.device) -> float:
    import torch

    durations_s = []
    for _ in range(_NUM_RUNS + 1):  # the first one warms up
        start_ns = time.perf_counter_ns()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        durations_s.append((time.perf_counter_ns() - start_ns) / 1e9)
    return min(durations_s[1:])
