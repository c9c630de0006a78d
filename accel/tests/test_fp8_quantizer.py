"""FP8 weights: the contract, the bound of a round trip, and what is beyond the largest number."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from sagellm.accel import FP8E5M2Quantizer, FP8Quantizer, QuantizationConfig, QuantizationGranularity
from sagellm.core import (
    InvalidInputError,
    PluginRegistry,
    ProviderSpec,
    QuantizationOutput,
    QuantizerProtocol,
)
from sagellm.core.protocols.weight_form import CodeType, WeightForm
from sagellm.testing.quantizer import GRANULARITIES, QuantizerContract

PER_TENSOR = QuantizationGranularity.PER_TENSOR
KINDS = [FP8Quantizer, FP8E5M2Quantizer]
LARGEST = {FP8Quantizer: 448, FP8E5M2Quantizer: 57344}
RELATIVE = {FP8Quantizer: 2**-4, FP8E5M2Quantizer: 2**-3}
HALF_THE_SMALLEST = {FP8Quantizer: 2**-10, FP8E5M2Quantizer: 2**-17}


class TestFP8Quantizer(QuantizerContract):
    def make(self, config: QuantizationConfig | None = None) -> QuantizerProtocol:
        return FP8Quantizer(config)


class TestFP8E5M2Quantizer(QuantizerContract):
    def make(self, config: QuantizationConfig | None = None) -> QuantizerProtocol:
        return FP8E5M2Quantizer(config)


finite_float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(deadline=None, max_examples=100)
@given(data=st.data(), kind=st.sampled_from(KINDS), granularity=st.sampled_from(GRANULARITIES))
def test_any_finite_weight_comes_back_within_the_bound(data, kind, granularity):
    num_rows, num_groups = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    count = num_rows * num_groups * 4
    numbers = data.draw(st.lists(finite_float32, min_size=count, max_size=count))
    weight = torch.tensor(numbers, dtype=torch.float32).reshape(num_rows, -1)
    quantizer = kind(QuantizationConfig(granularity=granularity, group_size=4))
    output = quantizer.quantize(weight)
    restored = quantizer.dequantize(output, torch.float64)
    scales = output.scales.double().repeat_interleave(weight.shape[1] // output.scales.shape[1], dim=1)
    allowed = torch.maximum(RELATIVE[kind] * weight.double().abs(), HALF_THE_SMALLEST[kind] * scales)
    assert bool(((restored - weight.double()).abs() <= allowed).all())


@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_is_nearly_reached(kind):
    """By what lies between 1 and the next number, and between 0 and the smallest one."""
    tie = (1 + RELATIVE[kind] * 0.999) / LARGEST[kind]
    small = HALF_THE_SMALLEST[kind] * 0.999 / LARGEST[kind]
    quantizer = kind()
    restored = quantizer.dequantize(quantizer.quantize(torch.tensor([[1.0, tie, small]])), torch.float32)
    error = (restored[0] - torch.tensor([1.0, tie, small])).abs()
    assert error[1] > 0.9 * RELATIVE[kind] * tie / (1 + RELATIVE[kind])
    assert error[2] == small


@pytest.mark.parametrize(
    ("kind", "dtype"), [(FP8Quantizer, torch.float8_e4m3fn), (FP8E5M2Quantizer, torch.float8_e5m2)]
)
def test_numbers_of_the_format_come_back_as_they_are(kind, dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    numbers = codes.float()[codes.float().isfinite()][None]
    quantizer = kind()
    output = quantizer.quantize(numbers)
    assert output.values.dtype == dtype
    assert float(output.scales) == 1.0
    assert torch.equal(quantizer.dequantize(output, torch.float32), numbers)


@pytest.mark.parametrize("kind", KINDS)
def test_of_two_nearest_numbers_the_even_one_is_taken(kind):
    places = 8 if kind is FP8Quantizer else 4
    ties = torch.tensor([[LARGEST[kind], 1 + 0.5 / places, 1 + 1.5 / places, -1 - 0.5 / places]])
    quantizer = kind()
    found = quantizer.dequantize(quantizer.quantize(ties.float()), torch.float32)
    assert found[0].tolist() == [LARGEST[kind], 1.0, 1 + 2 / places, -1.0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_clip_ratio_saturates_what_is_beyond_it(kind):
    weight = torch.tensor([[1.0, -1.0, 0.25, 0.1]])
    quantizer = kind(QuantizationConfig(clip_ratio=0.5))
    output = quantizer.quantize(weight)
    assert output.values[0, :2].float().tolist() == [LARGEST[kind], -LARGEST[kind]]
    restored = quantizer.dequantize(output, torch.float32)[0]
    assert restored[0] == pytest.approx(0.5, rel=2**-7)
    assert restored[3] == pytest.approx(0.1, rel=RELATIVE[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_of_bad_weights_names_the_row(kind):
    weight = torch.ones(6, 4)
    weight[4, 1] = -math.inf
    with pytest.raises(InvalidInputError, match="row 4"):
        kind().quantize(weight)


def broken(**changes):
    output = FP8Quantizer().quantize(torch.ones(4, 8))
    parts = {"values": output.values, "scales": output.scales, "config": output.config} | changes
    return QuantizationOutput(**parts)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"scales": torch.zeros(4, 1)}, "zero"),
        ({"scales": torch.full((4, 1), math.nan)}, "NaN"),
        ({"scales": torch.ones(4)}, r"\(out, in ÷ group_size\)"),
        ({"scales": torch.ones(4, 3)}, r"\(out, in ÷ group_size\)"),
        ({"values": torch.ones(4, 8, dtype=torch.float8_e5m2)}, "float8_e4m3fn"),
        ({"values": torch.full((4, 8), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)}, "row 0.*NaN"),
        ({"zeros": torch.zeros(4, 1, dtype=torch.int8)}, "no zeros"),
    ],
    ids=["zero", "nan", "one dimension", "no divisor", "other format", "nan code", "zeros"],
)
def test_what_no_quantizer_made_is_refused(changes, what):
    with pytest.raises(InvalidInputError, match=what):
        FP8Quantizer().dequantize(broken(**changes), torch.float32)


@pytest.mark.parametrize(("name", "code"), [("fp8", CodeType.FP8_E4M3), ("fp8_e5m2", CodeType.FP8_E5M2)])
def test_they_are_found_by_name_and_say_their_form(name, code):
    registry = PluginRegistry.load()
    assert registry.make("quantizer", ProviderSpec(name, {})).weight_form(64) == WeightForm(code=code)
    grouped = registry.make("quantizer", ProviderSpec(name, {"granularity": "per_group", "group_size": 16}))
    assert grouped.weight_form(64) == WeightForm(code=code, group_size=16)
    assert grouped.integer_form(64) is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_beside_outliers_keeps_small_weights(kind):
    """What integers of 8 bits with one scale lose."""
    weight = torch.full((4, 64), 1e-3)
    weight[0, 0] = 1.0
    quantizer = kind(QuantizationConfig(granularity=PER_TENSOR))
    restored = quantizer.dequantize(quantizer.quantize(weight), torch.float32)
    torch.testing.assert_close(restored, weight, rtol=RELATIVE[kind], atol=0)
