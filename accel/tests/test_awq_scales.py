"""Scales of inputs: they lower the error where some inputs matter, and are ones where none does."""

import math

import pytest
import torch

from sagellm.accel import (
    FP8Quantizer,
    Int4Quantizer,
    QuantizationConfig,
    QuantizationGranularity,
    search_input_scales,
)
from sagellm.core import InvalidInputError

NUM_INPUTS = 128
CONFIG = QuantizationConfig(granularity=QuantizationGranularity.PER_GROUP, group_size=32)


def calibration(*, is_salient, seed=0):
    """Return a weight, and rows in which every sixteenth input is thirty times as large, or none."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(96, NUM_INPUTS, generator=generator)
    rows = torch.randn(512, NUM_INPUTS, generator=generator)
    if is_salient:
        rows[:, ::16] *= 30
    return weight, rows.abs().mean(0), rows


def error_of(quantizer, weight, scales, rows):
    """Return the mean of ‖W x - W' x‖² by the formula."""
    rounded = quantizer.dequantize(quantizer.quantize(weight * scales), torch.float32) / scales
    return float((rows @ (rounded - weight).T).square().sum(1).mean())


@pytest.mark.parametrize("asymmetric", [False, True])
def test_salient_inputs_are_protected_also_on_rows_not_seen(asymmetric):
    quantizer = Int4Quantizer(CONFIG, asymmetric=asymmetric)
    weight, magnitudes, rows = calibration(is_salient=True)
    found = search_input_scales(quantizer, weight, magnitudes, rows)
    assert 0 < found.alpha <= 1
    assert found.error < 0.5 * found.error_without
    assert found.scales[::16].min() > found.scales[1::16].max()
    _, _, others = calibration(is_salient=True, seed=1)
    ones = torch.ones(NUM_INPUTS)
    without, by_them = (error_of(quantizer, weight, scales, others) for scales in (ones, found.scales))
    assert by_them < 0.5 * without


def test_errors_are_those_of_the_formula_and_the_least_on_the_grid():
    quantizer = Int4Quantizer(CONFIG)
    weight, magnitudes, rows = calibration(is_salient=True)
    found = search_input_scales(quantizer, weight, magnitudes, rows)
    assert found.error == pytest.approx(error_of(quantizer, weight, found.scales, rows), rel=1e-4)
    without = error_of(quantizer, weight, torch.ones(NUM_INPUTS), rows)
    assert found.error_without == pytest.approx(without, rel=1e-4)
    for index in range(20):
        scales = magnitudes ** (index / 19)
        scales = scales / (scales.max() * scales.min()).sqrt()
        assert found.error <= error_of(quantizer, weight, scales, rows) * (1 + 1e-4)
        if found.alpha == pytest.approx(index / 19):
            torch.testing.assert_close(found.scales, scales)


@pytest.mark.parametrize("kind", [Int4Quantizer, FP8Quantizer])
def test_scales_are_ones_where_nothing_is_gained(kind):
    quantizer = kind(CONFIG)
    weight, _, rows = calibration(is_salient=False)
    found = search_input_scales(quantizer, weight, torch.full((NUM_INPUTS,), 0.8), rows)
    assert torch.equal(found.scales, torch.ones(NUM_INPUTS))
    assert (found.alpha, found.error) == (0.0, found.error_without)


def test_inputs_that_are_never_reached_get_a_scale_too():
    weight, magnitudes, rows = calibration(is_salient=True)
    rows[:, 3] = magnitudes[3] = 0
    found = search_input_scales(Int4Quantizer(CONFIG), weight.to(torch.bfloat16), magnitudes, rows)
    assert bool((found.scales > 0).all() & found.scales.isfinite().all())
    assert found.error <= found.error_without


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"magnitudes": torch.ones(7)}, "do not fit"),
        ({"rows": torch.ones(4, 7)}, "do not fit"),
        ({"weight": torch.ones(NUM_INPUTS)}, "do not fit"),
        ({"rows": torch.ones(0, NUM_INPUTS)}, "no rows"),
        ({"rows": torch.full((2, NUM_INPUTS), math.nan)}, "row 0"),
        ({"magnitudes": -torch.ones(NUM_INPUTS)}, "negative"),
        ({"weight": torch.full((4, NUM_INPUTS), math.inf)}, "row 0"),
    ],
)
def test_bad_calibrations_are_refused(changes, what):
    weight, magnitudes, rows = calibration(is_salient=False)
    given = {"weight": weight, "magnitudes": magnitudes, "rows": rows} | changes
    with pytest.raises(InvalidInputError, match=what):
        search_input_scales(Int4Quantizer(CONFIG), **given)
