"""INT4 weights: the contract, the choice of groups and of scales."""

import pytest
import torch

from sagellm.accel import Int4Quantizer, QuantizationConfig, QuantizationGranularity
from sagellm.core import ConfigError, PluginRegistry, ProviderSpec, QuantizerProtocol
from sagellm.testing.quantizer import GRANULARITIES, QuantizerContract, max_error_steps

PER_GROUP = QuantizationGranularity.PER_GROUP
PER_CHANNEL = QuantizationGranularity.PER_CHANNEL


class TestInt4Quantizer(QuantizerContract):
    def make(self, config: QuantizationConfig | None = None) -> QuantizerProtocol:
        return Int4Quantizer(config)


class TestInt4QuantizerWithoutSearch(QuantizerContract):
    def make(self, config: QuantizationConfig | None = None) -> QuantizerProtocol:
        return Int4Quantizer(config, search_scales=False)


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


NORMAL = torch.randn(256, 512, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_without_the_search_nothing_is_cut_and_no_error_exceeds_half_a_scale(granularity):
    quantizer = Int4Quantizer(QuantizationConfig(granularity=granularity), search_scales=False)
    output = quantizer.quantize(NORMAL)
    restored = quantizer.dequantize(output, torch.float32)
    assert max_error_steps(NORMAL, restored, output.scales) <= 0.5 + 1e-5
    assert quantizer.metrics().max_error_steps <= quantizer.most_error_steps + 1e-5 == 0.5 + 1e-5
    assert output.values.abs().max() == 7


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_the_search_lowers_the_mean_error_at_every_granularity_and_states_the_largest(granularity):
    config = QuantizationConfig(granularity=granularity)
    squared, largest = {}, {}
    for is_searched in (False, True):
        quantizer = Int4Quantizer(config, search_scales=is_searched)
        restored = quantizer.dequantize(quantizer.quantize(NORMAL), torch.float32)
        squared[is_searched] = (restored - NORMAL).square().mean()
        largest[is_searched] = quantizer.metrics().max_error_steps
    assert squared[True] < 0.95 * squared[False]
    assert 0.5 < largest[True] <= quantizer.most_error_steps


def test_a_clip_ratio_cuts_as_much_as_it_says_without_the_search():
    config = QuantizationConfig(granularity=PER_CHANNEL, clip_ratio=0.5)
    scales = Int4Quantizer(config, search_scales=False).quantize(NORMAL).scales
    torch.testing.assert_close(scales, NORMAL.abs().amax(1, keepdim=True) / 14, rtol=2**-7, atol=0)


@pytest.mark.parametrize(
    ("options", "granularity", "group_size"),
    [
        ({}, PER_GROUP, 32),
        ({"search_scales": False}, PER_GROUP, 32),
        ({"clip_ratio": 0.9}, PER_GROUP, 32),
        ({"group_size": 16}, PER_GROUP, 16),
        ({"granularity": "per_channel"}, PER_CHANNEL, None),
    ],
)
def test_an_option_changes_what_it_names_and_leaves_the_rest(options, granularity, group_size):
    quantizer = PluginRegistry.load().make("quantizer", ProviderSpec("int4", options))
    config = quantizer.quantize(torch.randn(4, 96)).config
    assert config.granularity is granularity
    assert group_size is None or config.group_size == group_size
    assert config.clip_ratio == options.get("clip_ratio", 1.0)
    assert quantizer.search_scales is options.get("search_scales", True)


def test_options_are_checked_and_told_with_their_defaults():
    chosen = PluginRegistry.load().choose("quantizer", ProviderSpec("int4", {}))
    told = {each.name: each.default for each in chosen.options()}
    assert told == {
        **{"clip_ratio": 1.0, "group_size": 128, "granularity": "per_group"},
        **{"search_scales": True, "asymmetric": False},
    }
    with pytest.raises(ConfigError, match=r"has no option 'search_scale'.*Did you mean 'search_scales'"):
        PluginRegistry.load().make("quantizer", ProviderSpec("int4", {"search_scale": False}))
    with pytest.raises(ConfigError, match="search_scales is 'no'; it must be true or false"):
        PluginRegistry.load().make("quantizer", ProviderSpec("int4", {"search_scales": "no"}))


def test_one_outlier_takes_the_precision_of_its_group_alone():
    weight = torch.randn(1, 256, generator=torch.Generator().manual_seed(1)) / 10
    weight[0, 3] = 100
    quantizer = Int4Quantizer()
    restored = quantizer.dequantize(quantizer.quantize(weight), torch.float32)
    assert (restored - weight)[0, 128:].abs().max() < 0.1
