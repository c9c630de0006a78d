"""Integers with zero points: the contract, the bound, and what they gain where weights are not centred."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings, strategies as st

from sagellm.accel import Int4Quantizer, Int8Quantizer, QuantizationConfig, QuantizationGranularity
from sagellm.accel.code_products import fits_kernel
from sagellm.core import (
    InvalidInputError,
    PluginRegistry,
    ProviderSpec,
    QuantizationOutput,
    QuantizerProtocol,
)
from sagellm.core.protocols.weight_form import CodeType, WeightForm
from sagellm.testing.quantizer import GRANULARITIES, QuantizerContract, max_error_steps

PER_GROUP = QuantizationGranularity.PER_GROUP
WHOLE_ROWS = QuantizationConfig(granularity=QuantizationGranularity.PER_CHANNEL)
HALF_A_STEP = 0.5 + QuantizerContract.ROUNDING
KINDS = [
    pytest.param(partial(Int8Quantizer, asymmetric=True), -128, 127, id="int8"),
    pytest.param(partial(Int4Quantizer, asymmetric=True, search_scales=False), -8, 7, id="int4"),
]


class TestAsymmetricInt8(QuantizerContract):
    def make(self, config: QuantizationConfig | None = None) -> QuantizerProtocol:
        return Int8Quantizer(config, asymmetric=True)


class TestAsymmetricInt4(QuantizerContract):
    def make(self, config: QuantizationConfig | None = None) -> QuantizerProtocol:
        return Int4Quantizer(config, asymmetric=True)


class TestAsymmetricInt4WithoutSearch(QuantizerContract):
    def make(self, config: QuantizationConfig | None = None) -> QuantizerProtocol:
        return Int4Quantizer(config, asymmetric=True, search_scales=False)


moderate = st.floats(-(2.0**100), 2.0**100, width=32)


@pytest.mark.parametrize(("kind", "least", "most"), KINDS)
@settings(deadline=None, max_examples=100)
@given(data=st.data(), granularity=st.sampled_from(GRANULARITIES))
def test_any_weight_comes_back_within_half_a_step_and_zero_exactly(kind, least, most, data, granularity):
    num_rows, num_groups = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    count = num_rows * num_groups * 4
    numbers = data.draw(st.lists(moderate, min_size=count, max_size=count))
    weight = torch.tensor(numbers, dtype=torch.float32).reshape(num_rows, -1)
    quantizer = kind(QuantizationConfig(granularity=granularity, group_size=4))
    output = quantizer.quantize(weight)
    restored = quantizer.dequantize(output, torch.float64)
    assert max_error_steps(weight, restored, output.scales) <= HALF_A_STEP
    assert bool((restored[weight == 0] == 0).all())
    assert least <= int(output.values.min()) <= int(output.values.max()) <= most


@pytest.mark.parametrize(("kind", "least", "most"), KINDS)
@pytest.mark.parametrize(("low", "high"), [(-3.0, 1.0), (0.5, 2.0), (-2.0, -0.5)])
def test_all_values_are_used_for_the_range_with_zero(kind, least, most, low, high):
    output = kind(WHOLE_ROWS).quantize(torch.linspace(low, high, 1024)[None])
    steps = (max(high, 0) - min(low, 0)) / (most - least)
    assert float(output.scales.max()) == pytest.approx(steps, rel=2**-7)
    zero = int(output.zeros.flatten()[0])
    assert zero == pytest.approx(least - min(low, 0) / steps, abs=2)  # scales are rounded up by up to 1 %
    if low < 0 < high:
        assert int(output.values.max()) - int(output.values.min()) >= 0.93 * (most - least)


def test_weights_to_one_side_lose_half_of_what_symmetric_integers_lose():
    weight = torch.rand(64, 256, generator=torch.Generator().manual_seed(0))
    errors = {}
    for asymmetric in (False, True):
        config = QuantizationConfig(granularity=PER_GROUP, group_size=32)
        quantizer = Int4Quantizer(config, asymmetric=asymmetric)
        restored = quantizer.dequantize(quantizer.quantize(weight), torch.float32)
        errors[asymmetric] = float((restored - weight).square().mean())
    assert errors[True] < 0.3 * errors[False]


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_the_search_lowers_the_mean_error_and_states_the_largest(granularity):
    weight = torch.randn(256, 512, generator=torch.Generator().manual_seed(2)) + 0.3
    squared = {}
    for is_searched in (False, True):
        quantizer = Int4Quantizer(
            QuantizationConfig(granularity=granularity), search_scales=is_searched, asymmetric=True
        )
        restored = quantizer.dequantize(quantizer.quantize(weight), torch.float32)
        squared[is_searched] = (restored - weight).square().mean()
    assert squared[True] < 0.97 * squared[False]
    assert 0.5 < quantizer.metrics().max_error_steps <= quantizer.most_error_steps


@pytest.mark.parametrize(("kind", "least", "most"), KINDS)
def test_a_clip_ratio_draws_both_ends_towards_zero(kind, least, most):
    weight = torch.tensor([[-2.0, 1.0, 0.0, 0.5]])
    quantizer = kind(QuantizationConfig(clip_ratio=0.5, granularity=QuantizationGranularity.PER_CHANNEL))
    output = quantizer.quantize(weight)
    assert float(output.scales) == pytest.approx(1.5 / (most - least), rel=2**-7)
    restored = quantizer.dequantize(output, torch.float32)[0]
    assert restored[:3].tolist() == pytest.approx([-1.0, 0.5, 0.0], abs=1.1 * float(output.scales))


@pytest.mark.parametrize("name", ["int4", "int8"])
def test_the_option_gives_a_form_with_zeros_and_none_for_kernels_of_symmetric_integers(name):
    registry = PluginRegistry.load()
    options = {"asymmetric": True, "granularity": "per_group", "group_size": 32}
    quantizer = registry.make("quantizer", ProviderSpec(name, options))
    assert quantizer.weight_form(64) == WeightForm(code=CodeType(name), group_size=32, has_zeros=True)
    assert quantizer.integer_form(64) is None
    per_row = registry.make(
        "quantizer", ProviderSpec(name, {"asymmetric": True, "granularity": "per_channel"})
    )
    assert per_row.integer_form(64) is None
    assert not registry.make("quantizer", ProviderSpec(name, {})).weight_form(64).has_zeros


def test_torchs_kernel_is_left_alone_as_it_knows_no_zeros():
    x = torch.randn(2, 64).to(torch.bfloat16)
    assert fits_kernel(x, Int8Quantizer().quantize(torch.randn(16, 64)))
    assert not fits_kernel(x, Int8Quantizer(asymmetric=True).quantize(torch.randn(16, 64)))


@pytest.mark.parametrize(
    "zeros",
    [torch.zeros(4, 1), torch.zeros(4, dtype=torch.int8), torch.zeros(4, 2, dtype=torch.int8)],
    ids=["floats", "one dimension", "of other groups"],
)
def test_zeros_unlike_the_scales_are_refused(zeros):
    quantizer = Int8Quantizer(asymmetric=True)
    output = quantizer.quantize(torch.randn(4, 8))
    wrong = QuantizationOutput(values=output.values, scales=output.scales, config=output.config, zeros=zeros)
    with pytest.raises(InvalidInputError, match="zeros"):
        quantizer.dequantize(wrong, torch.float32)


def test_zeros_count_as_bytes():
    quantizer = Int4Quantizer(asymmetric=True)
    output = quantizer.quantize(torch.randn(4, 256))
    assert output.num_bytes == 4 * 256 + 4 * 2 * (4 + 1)
    assert quantizer.metrics().quantized_bytes == output.num_bytes
