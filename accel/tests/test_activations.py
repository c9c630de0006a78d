"""Activations rounded to 8 bits: the formula value by value, and what is refused."""

import math

import pytest
import torch

from sagellm.accel import quantized_linear, round_activations
from sagellm.accel.activations import fake_quantized
from sagellm.core import InvalidInputError
from sagellm.core.protocols.weight_form import ActivationForm, CodeType

INT8, FP8 = CodeType.INT8, CodeType.FP8_E4M3
DTYPES = {INT8: torch.int8, FP8: torch.float8_e4m3fn}
LARGEST = {INT8: 127, FP8: 448}
FORMS = [
    ActivationForm(code=code, group_size=group_size, scale=scale)
    for code in (INT8, FP8)
    for group_size, scale in ((0, None), (16, None), (0, 0.03))
]


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def nearest(number, code):
    """Return the nearest code's number, of two the even one."""
    number = min(max(number, -LARGEST[code]), LARGEST[code])
    if code is INT8:
        return round(number)  # half to even
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).tolist()
    index = min(range(127), key=lambda i: (abs(numbers[i] - abs(number)), i % 2))
    return math.copysign(numbers[index], number)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_codes_and_scales_are_the_formula_value_by_value(form):
    x = random(3, 48)
    codes, scales = round_activations(x, form)
    assert codes.dtype == DTYPES[form.code]
    group_size = form.group_size or 48
    expected = (1, 1) if form.scale is not None else (3, 48 // group_size)
    assert (scales.dtype, tuple(scales.shape)) == (torch.float32, expected)
    for token in range(3):
        for begin in range(0, 48, group_size):
            group = x[token, begin : begin + group_size]
            scale = torch.tensor(form.scale) if form.scale else group.abs().max() / LARGEST[form.code]
            assert scales[0 if form.scale else token, begin // group_size if not form.scale else 0] == scale
            wanted = [nearest(float(value / scale), form.code) for value in group]
            assert codes[token, begin : begin + group_size].float().tolist() == wanted


@pytest.mark.parametrize("form", FORMS[:2] + FORMS[3:5], ids=str)
def test_what_is_dynamic_comes_back_within_the_bound(form):
    x = random(8, 64).to(torch.bfloat16)
    rounded = round_activations(x, form)
    allowed = rounded.scales.repeat_interleave(64 // rounded.scales.shape[1], dim=1)
    is_fp8 = form.code is FP8
    allowed = torch.maximum(x.float().abs() / 16, allowed / 2**10) if is_fp8 else allowed / 2
    assert bool(((rounded.expand() - x.float()).abs() <= allowed * (1 + 1e-4)).all())


def test_a_scale_known_before_saturates_what_is_beyond_it():
    x = torch.tensor([[1000.0, -1000.0, 0.25]])
    for code in (INT8, FP8):
        form = ActivationForm(code=code, scale=0.1)
        assert round_activations(x, form).codes.float()[0, :2].tolist() == [LARGEST[code], -LARGEST[code]]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_zeros_stay_zeros_and_tokens_do_not_touch_each_other(form):
    x = random(4, 64)
    x[2] = 0
    found = fake_quantized(x, form)
    assert not found[2].any()
    assert torch.equal(found[:1], fake_quantized(x[:1], form))
    assert fake_quantized(x[:0], form).shape == (0, 64)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_reference_product_is_that_of_both_numbers(form):
    x, weight, bias = random(5, 64).to(torch.bfloat16), random(7, 64, seed=1), random(7, seed=2)
    expected = round_activations(x, form).expand().double() @ weight.double().T + bias
    found = quantized_linear(x, weight, form, bias)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-5)
    assert not torch.equal(found, (x.float() @ weight.T + bias).to(x.dtype))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_activations_that_are_not_finite_are_refused_with_the_row(value):
    x = random(4, 16)
    x[3, 5] = value
    with pytest.raises(InvalidInputError, match="row 3"):
        round_activations(x, FORMS[0])
    found = fake_quantized(x, FORMS[3])  # in a step nothing is checked: the token is lost, not another
    assert bool(found[3].isnan().any())
    assert bool(found[:3].isfinite().all())


@pytest.mark.parametrize(
    ("form", "what"),
    [
        (ActivationForm(code=CodeType.INT4), "int8 and fp8_e4m3"),
        (ActivationForm(code=INT8, group_size=7), "do not divide 16"),
        (ActivationForm(code=INT8, group_size=-4), "do not divide 16"),
        (ActivationForm(code=INT8, scale=0.0), "positive"),
        (ActivationForm(code=FP8, scale=math.nan), "positive"),
        (ActivationForm(code=FP8, scale=0.1, group_size=8), "groups"),
    ],
)
def test_forms_that_make_no_sense_are_refused(form, what):
    with pytest.raises(InvalidInputError, match=what):
        round_activations(random(2, 16), form)


@pytest.mark.parametrize("x", [torch.ones(4), torch.ones(2, 4, 4), torch.ones(2, 4, dtype=torch.int32)])
def test_only_matrices_of_floats_are_rounded(x):
    with pytest.raises(InvalidInputError, match=r"\(tokens, in\)"):
        round_activations(x, FORMS[0])
