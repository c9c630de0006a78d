"""INT8 weights: the contract, what is special to eight bits, and the ways to multiply."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from sagellm.accel import Int8Quantizer, QuantizationConfig, QuantizationGranularity
from sagellm.accel.code_products import fits_kernel, packed_product, sliced_product
from sagellm.core import ConfigError, InvalidInputError, QuantizationOutput, QuantizerProtocol
from sagellm.testing.quantizer import GRANULARITIES, QuantizerContract, max_error_steps

HALF_A_STEP = 0.5 + QuantizerContract.ROUNDING
PER_CHANNEL, PER_GROUP, PER_TENSOR = (
    QuantizationGranularity.PER_CHANNEL,
    QuantizationGranularity.PER_GROUP,
    QuantizationGranularity.PER_TENSOR,
)


class TestInt8Quantizer(QuantizerContract):
    def make(self, config: QuantizationConfig | None = None) -> QuantizerProtocol:
        return Int8Quantizer(config)


finite_float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(deadline=None, max_examples=200)
@given(
    data=st.data(), granularity=st.sampled_from(GRANULARITIES), dtype=st.sampled_from(["float32", "bfloat16"])
)
def test_any_finite_weight_comes_back_within_half_a_step(data, granularity, dtype):
    num_rows = data.draw(st.integers(1, 6))
    num_columns = data.draw(st.integers(1, 4)) * 4
    numbers = data.draw(
        st.lists(finite_float32, min_size=num_rows * num_columns, max_size=num_rows * num_columns)
    )
    weight = (
        torch.tensor(numbers, dtype=torch.float32).to(getattr(torch, dtype)).reshape(num_rows, num_columns)
    )
    quantizer = Int8Quantizer(QuantizationConfig(granularity=granularity, group_size=4))
    if not bool(weight.isfinite().all()):  # rounding to bfloat16 may reach infinity
        with pytest.raises(InvalidInputError):
            quantizer.quantize(weight)
        return
    output = quantizer.quantize(weight)
    restored = quantizer.dequantize(output, torch.float64)
    assert max_error_steps(weight, restored, output.scales) <= HALF_A_STEP
    assert bool((restored[weight == 0] == 0).all())


@pytest.mark.parametrize("largest", [1e-45, 1e-38, 1e-30, 1e30, 3.4e38])
def test_extreme_magnitudes_neither_overflow_nor_divide_by_zero(largest):
    weight = torch.tensor([[largest, -largest, 0.0, largest / 2]])
    quantizer = Int8Quantizer()
    output = quantizer.quantize(weight)
    restored = quantizer.dequantize(output, torch.float64)
    assert max_error_steps(weight, restored, output.scales) <= HALF_A_STEP


def test_a_scale_is_the_largest_magnitude_over_127_rounded_up_to_eight_bits():
    weight = torch.randn(50, 64, generator=torch.Generator().manual_seed(3))
    scales = Int8Quantizer().quantize(weight).scales
    exact = weight.abs().amax(dim=1, keepdim=True) / 127
    assert scales.dtype == torch.float32
    assert torch.equal(scales.to(torch.bfloat16).float(), scales)
    assert bool((scales >= exact).all())
    assert bool((scales <= exact * (1 + 1 / 128)).all())


def test_the_code_minus_128_is_never_used():
    values = Int8Quantizer().quantize(torch.randn(64, 64)).values
    assert values.dtype == torch.int8
    assert int(values.min()) >= -127


def test_finer_granularity_gives_a_smaller_error():
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(32, 64, generator=generator) * torch.rand(32, 64, generator=generator) ** 4
    errors = []
    for granularity in (PER_TENSOR, PER_CHANNEL, PER_GROUP):
        quantizer = Int8Quantizer(QuantizationConfig(granularity=granularity, group_size=8))
        restored = quantizer.dequantize(quantizer.quantize(weight), torch.float32)
        errors.append(float((restored - weight).square().mean()))
    assert errors == sorted(errors, reverse=True)


def test_clipping_cuts_the_scale_and_reports_the_larger_error():
    weight = torch.tensor([[1.0, 0.1, -0.1, 0.05]])
    quantizer = Int8Quantizer(QuantizationConfig(clip_ratio=0.5))
    output = quantizer.quantize(weight)
    assert float(output.scales) == pytest.approx(0.5 / 127, rel=1 / 128)
    assert quantizer.dequantize(output, torch.float32)[0, 0] == pytest.approx(0.5, rel=1 / 128)
    assert quantizer.metrics().max_error_steps > 100


def test_the_error_of_bad_weights_names_the_row():
    weight = torch.ones(6, 4)
    weight[4, 1] = math.nan
    with pytest.raises(InvalidInputError, match="row 4"):
        Int8Quantizer().quantize(weight)


def test_views_and_parameters_can_be_quantized():
    weight = torch.nn.Parameter(torch.randn(16, 24))
    quantizer = Int8Quantizer()
    output = quantizer.quantize(weight.T)
    assert output.values.is_contiguous()
    assert not output.scales.requires_grad
    restored = quantizer.dequantize(output, torch.float32)
    assert max_error_steps(weight.T.detach(), restored, output.scales) <= HALF_A_STEP


def broken(**changes):
    output = Int8Quantizer().quantize(torch.randn(4, 8))
    parts = {"values": output.values, "scales": output.scales, "config": output.config} | changes
    return QuantizationOutput(**parts)


@pytest.mark.parametrize(
    "changes",
    [
        {"scales": torch.zeros(4, 1)},
        {"scales": torch.full((4, 1), math.nan)},
        {"scales": -torch.ones(4, 1)},
        {"scales": torch.ones(4)},
        {"scales": torch.ones(3, 1)},
        {"scales": torch.ones(4, 3)},
        {"values": torch.ones(4, 8)},
        {"values": torch.ones(8, dtype=torch.int8)},
    ],
    ids=["zero", "nan", "negative", "one dimension", "too few rows", "no divisor", "floats", "vector"],
)
def test_what_no_quantizer_made_is_refused(changes):
    with pytest.raises(InvalidInputError):
        Int8Quantizer().dequantize(broken(**changes), torch.float32)


def test_an_input_of_the_wrong_width_names_both_shapes():
    with pytest.raises(InvalidInputError, match=r"\(2, 9\).*\(4, 8\)"):
        Int8Quantizer().linear(torch.ones(2, 9), broken())


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 6])
@pytest.mark.parametrize("shape", [(16, 16), (7, 48), (151, 896), (33, 80)])
def test_the_packed_kernel_agrees_with_expanded_weights(shape, num_tokens):
    quantizer = Int8Quantizer()
    output = quantizer.quantize(torch.randn(shape))
    x = torch.randn(num_tokens, shape[1]).to(torch.bfloat16)
    assert fits_kernel(x, output)
    packed, sliced = packed_product(x, output).float(), sliced_product(x, output).float()
    torch.testing.assert_close(packed, sliced, rtol=2**-7, atol=2**-7 * float(sliced.abs().max()))
    strided = torch.stack([x, x], dim=2)[:, :, 0]
    assert torch.equal(quantizer.linear(strided, output), quantizer.linear(x, output))


@pytest.mark.parametrize(
    ("dtype", "num_tokens", "num_columns"),
    [("float32", 1, 64), ("float16", 1, 64), ("bfloat16", 7, 64), ("bfloat16", 1, 63), ("bfloat16", 1, 24)],
)
def test_the_packed_kernel_is_left_alone_where_it_is_slow_or_reads_too_far(dtype, num_tokens, num_columns):
    output = Int8Quantizer().quantize(torch.randn(8, num_columns))
    assert not fits_kernel(torch.ones(num_tokens, num_columns, dtype=getattr(torch, dtype)), output)


def test_a_granularity_is_one_of_three():
    with pytest.raises(ConfigError, match="PER_GROUP"):
        QuantizationConfig(granularity="per_group")


def test_float16_sums_do_not_overflow():
    quantizer = Int8Quantizer()
    output = quantizer.quantize(torch.full((4, 4096), 1e-3))
    product = quantizer.linear(torch.full((2, 4096), 100.0, dtype=torch.float16), output)
    torch.testing.assert_close(product.float(), torch.full((2, 4), 409.6), rtol=2e-2, atol=0)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_matrix_of_many_slices_is_covered_exactly_once(granularity, monkeypatch):
    quantizer = Int8Quantizer(QuantizationConfig(granularity=granularity, group_size=16))
    weight = torch.randn(103, 32)
    x = torch.randn(9, 32)
    output = quantizer.quantize(weight)
    whole = quantizer.linear(x, output)
    monkeypatch.setattr("sagellm.accel.slices.CPU_SLICE_BYTES", 5000)
    torch.testing.assert_close(quantizer.linear(x, output), whole)


def peak_bytes(path="/proc/self/status"):
    with open(path) as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_large_head_is_never_expanded_at_once(dtype):
    """48,000 × 1,024: 49 MB of codes, of which a full copy would take 98 or 197 MB more."""
    weight = torch.randn(48_000, 1024).to(getattr(torch, dtype))
    quantizer = Int8Quantizer()
    x = torch.randn(16, 1024).to(weight.dtype)
    quantizer.linear(x, quantizer.quantize(weight[:64]))  # what the first call loads is not ours
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # forget the peak
    except OSError:
        pytest.skip("the kernel does not let a process reset its peak")
    start = peak_bytes()
    output = quantizer.quantize(weight)
    after_quantizing = peak_bytes()
    quantizer.linear(x, output)
    assert after_quantizing - start < output.num_bytes + (32 << 20)
    assert peak_bytes() - start < output.num_bytes + (32 << 20)


@pytest.mark.cuda
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_the_same_code_runs_on_cuda(granularity):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    quantizer = Int8Quantizer(QuantizationConfig(granularity=granularity, group_size=16))
    output = quantizer.quantize(torch.randn(200, 64, device="cuda"))
    restored = quantizer.dequantize(output, torch.float32)
    x = torch.randn(3, 64, device="cuda")
    torch.testing.assert_close(quantizer.linear(x, output), x @ restored.T, rtol=1e-4, atol=1e-4)
