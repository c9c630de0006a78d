"""What the hardware can do, measured in the same run as the figures compared with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from sagellm.core import MFUResult, bandwidth_use, roofline_ratio

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
    """The peak, the read bandwidth and the rate of real products, and how the first two were found."""

    peak_flops_per_s: float
    read_bandwidth_bytes_per_s: float
    peak_source: str
    gemm_flops_per_s: float | None = None  # of torch's product of 512 rows, in the faster number format
    bandwidth_source: str = ""


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


def roofline_figures(
    before: WorkMetrics, after: WorkMetrics, time_s: float, limits: Limits
) -> RooflineFigures | None:
    """Compare the work between two readings with the limits; None if nothing was computed between them."""
    flops, read_bytes = after.flops - before.flops, after.read_bytes - before.read_bytes
    if not flops or not read_bytes:
        return None
    reached = MFUResult(
        flops=flops,
        time_s=time_s,
        peak_flops_per_s=limits.peak_flops_per_s,
        peak_source=limits.peak_source,
    )
    return RooflineFigures(
        mfu=reached.mfu,
        bandwidth_use=bandwidth_use(read_bytes, time_s, limits.read_bandwidth_bytes_per_s),
        roofline_ratio=roofline_ratio(
            num_bytes=read_bytes,
            bandwidth_bytes_per_s=limits.read_bandwidth_bytes_per_s,
            flops=flops,
            peak_flops_per_s=limits.peak_flops_per_s,
            time_s=time_s,
        ),
    )


class _Rate(NamedTuple):
    per_s: float
    source: str


def measure_limits(device: torch.device, dtype: torch.dtype, *, is_int8: bool = False) -> Limits:
    """Measure the read bandwidth, the peak for this number format and torch's product, the best of five each.

    On a CPU the native library's loops give bandwidth and peak: widest loads, and the widest instruction over
    registers or tiles, for bfloat16 and int8. Without them, or for other formats, a sum over 1 GiB stands for
    the bandwidth, and torch's product of 512 rows for the peak, in `dtype` or float32, whichever is faster:
    some CPUs multiply bfloat16 slowly.
    """
    product = _product_rate(device, dtype)
    peak = _native_peak(device, dtype, is_int8=is_int8) or product
    bandwidth = _native_bandwidth(device) or _sum_bandwidth(device)
    return Limits(
        peak_flops_per_s=peak.per_s,
        read_bandwidth_bytes_per_s=bandwidth.per_s,
        peak_source=f"{peak.source}, measured in this run",
        gemm_flops_per_s=product.per_s,
        bandwidth_source=f"{bandwidth.source}, measured in this run",
    )


def _native_peak(device: torch.device, dtype: torch.dtype, *, is_int8: bool) -> _Rate | None:
    import torch

    from sagellm.accel.machine_limits import native_limits

    native = native_limits() if device.type == "cpu" else None
    if native is None or not (is_int8 or dtype is torch.bfloat16):
        return None
    kind: Literal["bfloat16", "int8"] = "int8" if is_int8 else "bfloat16"
    rate = native.matrix_rate(kind, torch.get_num_threads())
    source = f"a loop of the widest {kind} instruction ({native.variant})"
    return None if rate is None else _Rate(rate, source)


def _native_bandwidth(device: torch.device) -> _Rate | None:
    import torch

    from sagellm.accel.machine_limits import native_limits

    native = native_limits() if device.type == "cpu" else None
    rate = None if native is None else native.read_bandwidth(READ_BYTES, torch.get_num_threads())
    return None if rate is None else _Rate(rate, "widest loads over 1 GiB")


def _sum_bandwidth(device: torch.device) -> _Rate:
    import torch

    data = torch.zeros(READ_BYTES // 4, dtype=torch.float32, device=device)
    return _Rate(data.nbytes / _best_s(lambda: data.sum(), device), "a sum over 1 GiB")


def _product_rate(device: torch.device, dtype: torch.dtype) -> _Rate:
    import torch

    rates = {one: _gemm_rate(device, one) for one in dict.fromkeys((dtype, torch.float32))}
    fastest = max(rates, key=lambda one: rates[one])
    name = str(fastest).removeprefix("torch.")
    return _Rate(rates[fastest], f"torch's {name} product of {_GEMM_ROWS} rows")


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
