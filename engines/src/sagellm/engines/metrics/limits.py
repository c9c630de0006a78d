"""What the hardware can do, measured in the same run as the figures compared with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, get_args

from sagellm.accel.machine_limits import NumberKind, native_limits
from sagellm.accel.threads import num_threads
from sagellm.engines.loading.device_and_dtype import device_name, device_type, resolve_dtype_name, torch_dtype

if TYPE_CHECKING:
    import torch

    from sagellm.engines.config.schema import EngineConfig

_GEMM_ROWS, _GEMM_SIZE = 512, 2048
_GPU_PEAK_ROWS = _GPU_PEAK_SIZE = 8192
"""The product that stands for a GPU's peak: as large as those of a long prompt."""
READ_BYTES = 1 << 30
"""Bytes read to measure the bandwidth: more than any cache holds."""

_NUM_RUNS = 5
_PRODUCTS = {"native": "int8", "cuda": "float8_e4m3fn"}
_QUANTIZED_PRODUCTS = _PRODUCTS | {f"sagellm-accel:{name}": dtype for name, dtype in _PRODUCTS.items()}
"""What forward backends multiply quantized weights in; others expand them to the model's dtype."""


@dataclass(frozen=True)
class Rate:
    """Bytes or operations per second, and how they were measured."""

    per_s: float
    source: str


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The peak, the read bandwidth and the rate of real products, and how the first two were found."""

    peak_flops_per_s: float
    read_bandwidth_bytes_per_s: float
    peak_source: str
    gemm_flops_per_s: float | None = None  # of torch's product of 512 rows, in the faster number format
    bandwidth_source: str = ""


def engine_limits(config: EngineConfig) -> Limits:
    """Measure the limits of what an engine with this configuration computes in.

    The configuration is the engine's own, in which the model's number format and the forward backend that
    were "auto" are resolved: a peak in another format is that of other instructions.
    """
    backend = config.forward.backend
    dtype = resolve_dtype_name(config.model.dtype, {})
    if config.model.quantization is not None and backend.name in _QUANTIZED_PRODUCTS:
        # int8 also of weights in 4 bits: the rows that they are multiplied with have 8
        dtype = _QUANTIZED_PRODUCTS[backend.name]
    return measure_limits(device_name(config.model.device), dtype)


def measure_limits(device: str, dtype: str) -> Limits:
    """Measure the read bandwidth, the peak of products in this number format and torch's product.

    Device and number format by name. The best of five each.
    """
    product = _product_rate(device, dtype, _GEMM_ROWS, _GEMM_SIZE)
    peak, bandwidth = _native_peak(device, dtype), read_bandwidth(device)
    if peak is None:
        peak = product if device == "cpu" else peak_rate(device, dtype)
    return Limits(
        peak_flops_per_s=peak.per_s,
        read_bandwidth_bytes_per_s=bandwidth.per_s,
        peak_source=f"{peak.source}, measured in this run",
        gemm_flops_per_s=product.per_s,
        bandwidth_source=f"{bandwidth.source}, measured in this run",
    )


def read_bandwidth(device: str) -> Rate:
    """Measure the bytes per second that a device reads.

    By the widest loads of the native library's loop on a CPU, else by a sum, over 1 GiB.
    """
    native = native_limits() if device == "cpu" else None
    rate = None if native is None else native.read_bandwidth(READ_BYTES, num_threads())
    return _sum_bandwidth(device) if rate is None else Rate(rate, "widest loads over 1 GiB")


def peak_rate(device: str, dtype: str) -> Rate:
    """Measure the most operations per second in a number format.

    On a CPU by the native library's loop: the widest instruction over registers or tiles. Without it, or for
    other formats, by torch's product in `dtype` or float32, whichever is faster: some CPUs multiply bfloat16
    slowly. It has 512 rows, on a GPU 8,192.
    """
    if (native := _native_peak(device, dtype)) is not None:
        return native
    size = (_GEMM_ROWS, _GEMM_SIZE) if device == "cpu" else (_GPU_PEAK_ROWS, _GPU_PEAK_SIZE)
    return _product_rate(device, dtype, *size)


def _native_peak(device: str, dtype: str) -> Rate | None:
    kind = next((each for each in get_args(NumberKind) if each == dtype), None)
    native = native_limits() if device == "cpu" and kind is not None else None
    if native is None or kind is None:
        return None
    rate = native.matrix_rate(kind, num_threads())
    return None if rate is None else Rate(rate, f"a loop of the widest {kind} instruction ({native.variant})")


def _sum_bandwidth(device: str) -> Rate:
    import torch

    data = torch.zeros(READ_BYTES // 4, dtype=torch.float32, device=device)
    return Rate(data.nbytes / _best_s(lambda: data.sum(), device), "a sum over 1 GiB")


def _product_rate(device: str, dtype: str, num_rows: int, size: int) -> Rate:
    if dtype == "int8":  # torch multiplies integers in no product that models use
        dtype = "bfloat16"
    rates = {one: _gemm_rate(device, one, num_rows, size) for one in dict.fromkeys((dtype, "float32"))}
    fastest = max(rates, key=lambda one: rates[one])
    return Rate(rates[fastest], f"torch's {fastest} product of {num_rows} rows")


def _gemm_rate(device: str, dtype: str, num_rows: int, size: int) -> float:
    import torch

    rows = torch.ones(num_rows, size, device=device).to(torch_dtype(dtype))
    weight = torch.ones(size, size, device=device).to(torch_dtype(dtype))
    multiply: Callable[[], torch.Tensor] = partial(torch.nn.functional.linear, rows, weight)
    if dtype == "float8_e4m3fn":
        one = torch.ones((), device=device)
        multiply = partial(torch._scaled_mm, rows, weight.t(), one, one, out_dtype=torch.bfloat16)
    return 2 * num_rows * size * size / _best_s(multiply, device)


def _best_s(run: Callable[[], torch.Tensor], device: str) -> float:
    import torch

    durations_s = []
    for _ in range(_NUM_RUNS + 1):  # the first one warms up
        start_ns = time.perf_counter_ns()
        run()
        if device_type(device) == "cuda":
            torch.cuda.synchronize(device)
        durations_s.append((time.perf_counter_ns() - start_ns) / 1e9)
    return min(durations_s[1:])
