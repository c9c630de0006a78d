"""What the hardware can do, measured in the same run as the figures compared with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from sagellm.engines.metrics.roofline import MFUResult, bandwidth_use, roofline_ratio

if TYPE_CHECKING:
    import torch

    from sagellm.engines.config.schema import EngineConfig
    from sagellm.engines.worker.work import WorkMetrics

_GEMM_ROWS, _GEMM_SIZE = 512, 2048
_GPU_PEAK_ROWS = _GPU_PEAK_SIZE = 8192
"""The product that stands for a GPU's peak: as large as those of a long prompt."""
READ_BYTES = 1 << 30
"""Bytes read to measure the bandwidth: more than any cache holds."""

_NUM_RUNS = 5
_PRODUCTS = {"native": "int8", "cuda": "float8_e4m3fn"}
_QUANTIZED_PRODUCTS = _PRODUCTS | {f"sagellm-accel:{name}": dtype for name, dtype in _PRODUCTS.items()}
"""What forward backends multiply quantized weights in; others expand them to the model's dtype."""


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


class _Rate(NamedTuple):
    per_s: float
    source: str


def engine_limits(config: EngineConfig) -> Limits:
    """Measure the limits of what an engine with this configuration computes in.

    The configuration is the engine's own, in which the model's number format and the forward backend that
    were "auto" are resolved: a peak in another format is that of other instructions.
    """
    import torch

    from sagellm.engines.loading.device_and_dtype import resolve_device, resolve_dtype

    backend = config.forward.backend
    dtype = resolve_dtype(config.model.dtype, {})
    if config.model.quantization is not None and backend.name in _QUANTIZED_PRODUCTS:
        # int8 also of weights in 4 bits: the rows that they are multiplied with have 8
        dtype = getattr(torch, _QUANTIZED_PRODUCTS[backend.name])
    return measure_limits(resolve_device(config.model.device), dtype)


def measure_limits(device: torch.device, dtype: torch.dtype) -> Limits:
    """Measure the read bandwidth, the peak of products in this number format and torch's product.

    The best of five each. On a CPU the native library's loops give bandwidth and peak: widest loads, and the
    widest instruction over registers or tiles, for bfloat16 and int8. Without them, or for other formats, a
    sum over 1 GiB stands for the bandwidth, and torch's product for the peak, in `dtype` or float32,
    whichever is faster: some CPUs multiply bfloat16 slowly. It has 512 rows, on a GPU 8,192.
    """
    product = _product_rate(device, dtype, _GEMM_ROWS, _GEMM_SIZE)
    peak = _native_peak(device, dtype)
    if peak is None:
        is_cpu = device.type == "cpu"
        peak = product if is_cpu else _product_rate(device, dtype, _GPU_PEAK_ROWS, _GPU_PEAK_SIZE)
    bandwidth = _native_bandwidth(device) or _sum_bandwidth(device)
    return Limits(
        peak_flops_per_s=peak.per_s,
        read_bandwidth_bytes_per_s=bandwidth.per_s,
        peak_source=f"{peak.source}, measured in this run",
        gemm_flops_per_s=product.per_s,
        bandwidth_source=f"{bandwidth.source}, measured in this run",
    )


def _native_peak(device: torch.device, dtype: torch.dtype) -> _Rate | None:
    import torch

    from sagellm.accel.machine_limits import NumberKind, native_limits

    kinds: dict[torch.dtype, NumberKind] = {torch.bfloat16: "bfloat16", torch.int8: "int8"}
    native = native_limits() if device.type == "cpu" and dtype in kinds else None
    if native is None:
        return None
    rate = native.matrix_rate(kinds[dtype], torch.get_num_threads())
    source = f"a loop of the widest {kinds[dtype]} instruction ({native.variant})"
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


def _product_rate(device: torch.device, dtype: torch.dtype, num_rows: int, size: int) -> _Rate:
    import torch

    if dtype is torch.int8:  # torch multiplies integers in no product that models use
        dtype = torch.bfloat16
    rates = {one: _gemm_rate(device, one, num_rows, size) for one in dict.fromkeys((dtype, torch.float32))}
    fastest = max(rates, key=lambda one: rates[one])
    name = str(fastest).removeprefix("torch.")
    return _Rate(rates[fastest], f"torch's {name} product of {num_rows} rows")


def _gemm_rate(device: torch.device, dtype: torch.dtype, num_rows: int, size: int) -> float:
    import torch

    rows = torch.ones(num_rows, size, device=device).to(dtype)
    weight = torch.ones(size, size, device=device).to(dtype)
    multiply: Callable[[], torch.Tensor] = partial(torch.nn.functional.linear, rows, weight)
    if dtype is torch.float8_e4m3fn:
        one = torch.ones((), device=device)
        multiply = partial(torch._scaled_mm, rows, weight.t(), one, one, out_dtype=torch.bfloat16)
    return 2 * num_rows * size * size / _best_s(multiply, device)


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
