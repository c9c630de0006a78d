"""INT4 weights: the contract, the choice of groups and of scales."""

import pytest
import torch

from sagellm.accel import Int4Quantizer, QuantizationConfig, QuantizationGranularity
from sagellm.core import QuantizerProtocol
from sagellm.core.testing.quantizer import QuantizerContract

PER_GROUP = QuantizationGranularity.PER_GROUP


class TestInt4Quantizer(QuantizerContract):
    def make(self, config: QuantizationConfig | None = None) -> QuantizerProtocol:
        return Int4Quantizer(config)


@pytest.mark.parametrize(
    ("num_columns", "num_groups"), [(1024, 8), (704, 11), (96, 3), (48, 3), (8, 1), (7, 7)]
)
def test_groups_are_the_largest_power_of_two_that_divides_a_row(num_columns, num_groups):
    output = Int4Quantizer().quantize(torch.randn(3, num_columns))
    assert output.scales.shape == (3, num_groups)
    assert output.config.group_size == num_columns // num_groups


def test_all_sixteen_values_are_used():
    weight = torch.linspace(-8, 7, 16)[None]
    config = QuantizationConfig(granularity=PER_GROUP, group_size=16)
    values = Int4Quantizer(config).quantize(weight).values
    assert (int(values.min()), int(values.max())) == (-8, 7)


def test_scales_are_chosen_for_the_least_squared_error():
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    quantizer = Int4Quantizer()
    found = quantizer.dequantize(quantizer.quantize(weight), torch.float32)
    steps = weight.view(64, 8, 128).abs().amax(-1, keepdim=True) / 7  # the widest scale alone
    plain = ((weight.view(64, 8, 128) / steps).round().clamp(-8, 7) * steps).view(64, 1024)
    error, plain_error = ((each - weight).square().mean() for each in (found, plain))
    assert error < 0.93 * plain_error


def test_one_outlier_takes_the_precision_of_its_group_alone():
    weight = torch.randn(1, 256, generator=torch.Generator().manual_seed(1)) / 10
    weight[0, 3] = 100
    quantizer = Int4Quantizer()
    restored = quantizer.dequantize(quantizer.quantize(weight), torch.float32)
    assert (restored - weight)[0, 128:].abs().max() < 0.1
