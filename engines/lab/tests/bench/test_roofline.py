"""The peak that figures are set against, with rates that a test states."""

from __future__ import annotations

import pytest

from sagellm.engines.config import EngineConfig
from sagellm.engines.metrics.limits import Limits, engine_limits, measure_limits
from sagellm.engines.worker.work import WorkMetrics
from sagellm.lab.bench.roofline import roofline_figures

BF16 = (2e12, "a loop of the widest bfloat16 instruction (amx), measured in this run")
INT8 = (4e12, "a loop of the widest int8 instruction (amx), measured in this run")
FLOAT32 = (5e11, "a loop of the widest float32 instruction (amx), measured in this run")


@pytest.mark.parametrize(
    ("settings", "peak"),
    [
        ({"dtype": "float32", "forward_backend": "native"}, FLOAT32),
        ({"dtype": "bfloat16", "forward_backend": "native"}, BF16),
        ({"dtype": "bfloat16", "forward_backend": "torch"}, BF16),
        ({"dtype": "bfloat16", "forward_backend": "native", "quantization": "int8"}, INT8),
        ({"dtype": "bfloat16", "forward_backend": "sagellm-accel:native", "quantization": "int4"}, INT8),
        ({"dtype": "float32", "forward_backend": "native", "quantization": "int8"}, INT8),
        ({"dtype": "bfloat16", "forward_backend": "torch", "quantization": "int8"}, BF16),
        ({"dtype": "float32", "forward_backend": "torch", "quantization": "int4"}, FLOAT32),
    ],
)
def test_the_peak_is_that_of_the_format_that_products_run_in(machine, settings, peak):
    limits = engine_limits(EngineConfig.from_flat(device="cpu", **settings))
    assert (limits.peak_flops_per_s, limits.peak_source) == peak
    assert limits.gemm_flops_per_s == 1e11


def test_fp8_products_have_a_peak_of_their_own(machine):
    settings = {"dtype": "bfloat16", "forward_backend": "cuda", "quantization": "fp8"}
    config = EngineConfig.from_flat(device="cpu", **settings)
    limits = engine_limits(config)
    assert limits.peak_source == "torch's float8_e4m3fn product of 512 rows, measured in this run"
    assert limits.peak_flops_per_s == 3e11


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_without_the_library_s_loops_a_product_is_the_peak(machine, monkeypatch, dtype):
    monkeypatch.setattr("sagellm.engines.metrics.limits.native_limits", lambda: None)
    assert measure_limits("cpu", dtype).peak_flops_per_s == 1e11


def test_products_of_every_format_can_be_timed():
    from sagellm.engines.metrics.limits import _gemm_rate

    for dtype in ("float32", "bfloat16", "float8_e4m3fn"):
        assert _gemm_rate("cpu", dtype, 16, 64) > 0


def figures(flops):
    limits = Limits(peak_flops_per_s=1e12, read_bandwidth_bytes_per_s=1e10, peak_source="a test's")
    return roofline_figures(WorkMetrics(flops=flops, read_bytes=10**9), 2.0, limits)


def test_a_figure_above_the_peak_is_an_error_and_not_cut():
    found = figures(3 * 10**12)
    assert (found.mfu, found.roofline_ratio, found.bandwidth_use) == (1.5, 1.5, 0.05)
    assert found.mfu_error.startswith("an MFU of 1.5 cannot be true: the peak of 1 TFLOP/s (a test's) is")
    assert figures(2 * 10**12).mfu_error is None
    assert figures(2 * 10**12).mfu == 1.0
    assert figures(0) is None
