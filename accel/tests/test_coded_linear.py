"""Quantized weights of a checkpoint compute what their dequantized selves compute."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sagellm.accel import quantized_linear
from sagellm.accel.coded import expand, numbers_of
from sagellm.accel.fusion import join
from sagellm.accel.linear import LinearContext, PlainLinear, Product, WideRows
from sagellm.accel.model_loader import ModelLoader
from sagellm.accel.weights import WeightReader
from sagellm.core import WHOLE, Shard, StoredTensor, TensorSpec, UnsupportedModelError, WeightSource
from sagellm.core.protocols.model_spec import FusedLinear, LinearPart
from sagellm.core.protocols.weight_form import ActivationForm, CodedRows, CodeType, WeightForm

CPU = torch.device("cpu")
NUM_INPUTS = 64
FORMS = [
    WeightForm(code=CodeType.INT4, group_size=32),
    WeightForm(code=CodeType.INT4, group_size=16, has_zeros=True),
    WeightForm(code=CodeType.INT4, group_size=32, has_order=True),
    WeightForm(code=CodeType.INT8),
    WeightForm(code=CodeType.INT8, group_size=16, has_offsets=True),
    WeightForm(code=CodeType.FP8_E4M3, group_size=64),
    WeightForm(code=CodeType.FP8_E5M2),
    WeightForm(code=CodeType.FP4_E2M1, group_size=32),
    WeightForm(code=CodeType.UINT4, group_size=16, scale_group=32, has_offsets=True),
    WeightForm(code=CodeType.INT6, group_size=16, scale_group=64),
]


class Codes(WeightSource):
    """Quantized weights in memory."""

    def __init__(self) -> None:
        self.tensors: dict[str, StoredTensor] = {}
        self._rows: dict[str, CodedRows] = {}
        self._orders: dict[str, Any] = {}

    def add(self, name: str, form: WeightForm, num_outputs: int) -> TensorSpec:
        """Add random codes in a form."""
        random = np.random.default_rng(len(self._rows))
        groups = form.num_groups(NUM_INPUTS)
        codes = random.integers(0, 256, (num_outputs, NUM_INPUTS * form.code.bits // 8), np.uint8)
        if form.code.bits == 8:
            codes[~np.isfinite(numbers_of(form.code))[codes]] = 1
        several = (num_outputs, NUM_INPUTS // form.scale_group if form.scale_group else 0)
        factors = random.uniform(0.001, 0.002, several).astype(np.float16) if form.scale_group else None
        self._rows[name] = CodedRows(
            codes=codes,
            scales=random.uniform(0.01, 0.02, (num_outputs, groups)).astype(np.float32)
            if factors is None
            else random.integers(1, 16, (num_outputs, groups), np.int8),
            factors=factors,
            offset_factors=factors,
            zeros=random.integers(-8, 8, (num_outputs, groups), np.int8) if form.has_zeros else None,
            offsets=(random.normal(size=(num_outputs, groups)) * (1 if factors is None else 9)).astype(
                np.float32 if factors is None else np.int8
            )
            if form.has_offsets
            else None,
        )
        self._orders[name] = random.permutation(NUM_INPUTS) if form.has_order else None
        self.tensors[name] = StoredTensor(
            path=Path("memory"),
            dtype=form.code.upper(),
            shape=(num_outputs, NUM_INPUTS),
            num_bytes=codes.nbytes,
            form=form,
        )
        return TensorSpec(name, (num_outputs, NUM_INPUTS))

    def get(self, tensor: TensorSpec, shard: Shard = WHOLE) -> np.ndarray[Any, Any]:
        raise AssertionError("codes are no tensor")

    def coded_rows(self, tensor: TensorSpec, rows: slice, shard: Shard = WHOLE) -> CodedRows:
        return self._rows[tensor.name][rows]

    def input_order(self, tensor: TensorSpec) -> Any:
        return self._orders[tensor.name]

    def dequantized(self, tensor: TensorSpec) -> torch.Tensor:
        """Return what the codes stand for, one weight after the other."""
        form = self.tensors[tensor.name].form
        assert form is not None
        rows, numbers = self._rows[tensor.name], numbers_of(form.code)
        order = self._orders[tensor.name]
        weights = np.empty(tensor.shape, np.float32)
        for o in range(tensor.shape[0]):
            for j in range(NUM_INPUTS):
                g = j // form.group_size if form.group_size else 0
                code = rows.codes[o, j // 2] >> 4 * (j % 2) & 15 if form.code.bits == 4 else rows.codes[o, j]
                number = numbers[code] - (rows.zeros[o, g] if rows.zeros is not None else 0)
                factor = np.float32(rows.factors[o, j // form.scale_group]) if rows.factors is not None else 1
                weight = np.float32(number) * (np.float32(rows.scales[o, g]) * factor)
                if rows.offsets is not None:
                    weight -= np.float32(rows.offsets[o, g]) * factor
                weights[o, j if order is None else order[j]] = weight
        return torch.from_numpy(weights)


def load(weights: Codes, *tensors: TensorSpec, dtype: torch.dtype = torch.bfloat16) -> Product:
    parts = [
        LinearPart(
            tensor,
            None,
            slice(0, tensor.shape[0]),
            weights.tensors[tensor.name],
            weights.input_order(tensor),
        )
        for tensor in tensors
    ]
    loader = ModelLoader(WeightReader(weights, dtype), dtype, CPU, lambda: PlainLinear(CPU))
    return loader.side_by_side(join(FusedLinear((part,)) for part in parts))


def context(dtype: torch.dtype) -> LinearContext:
    return LinearContext(WideRows(dtype, CPU))


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_form_computes_what_its_dequantized_self_does(form: WeightForm, dtype: torch.dtype) -> None:
    weights = Codes()
    tensor = weights.add("w", form, 24)
    x = torch.randn(5, NUM_INPUTS).to(dtype)
    plain = PlainLinear(CPU).adopt(weights.dequantized(tensor).to(dtype))
    product = load(weights, tensor, dtype=dtype).apply(x, context(dtype))
    assert torch.equal(product, plain.apply(x, context(dtype)))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_expanding_is_the_formula_weight_by_weight(form: WeightForm) -> None:
    weights = Codes()
    tensor = weights.add("w", form, 7)
    rows, order = weights.coded_rows(tensor, slice(0, 7)), weights.input_order(tensor)
    assert np.array_equal(expand(rows, form, order), weights.dequantized(tensor).numpy())
    read = WeightReader(weights, torch.float32).load(tensor)
    assert torch.equal(read, weights.dequantized(tensor))


@pytest.mark.parametrize("code", [CodeType.INT8, CodeType.FP8_E4M3], ids=str)
@pytest.mark.parametrize(("group_size", "scale"), [(0, None), (16, None), (0, 0.02)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_activations_are_rounded_as_the_form_asks(
    code: CodeType, group_size: int, scale: float | None, dtype: torch.dtype
) -> None:
    weights = Codes()
    activations = ActivationForm(code=code, group_size=group_size, scale=scale)
    form = WeightForm(code=code, group_size=32, activations=activations)
    tensor = weights.add("w", form, 24)
    x = torch.randn(5, NUM_INPUTS).to(dtype)
    product = load(weights, tensor, dtype=dtype).apply(x, context(dtype))
    weight = weights.dequantized(tensor)
    assert torch.equal(product, quantized_linear(x, weight, activations))
    assert not torch.equal(product, (x.float() @ weight.T).to(dtype))


def test_activations_that_cannot_be_rounded_are_refused_with_the_weight() -> None:
    weights = Codes()
    activations = ActivationForm(code=CodeType.INT8, group_size=48)
    tensor = weights.add("w", WeightForm(code=CodeType.INT8, activations=activations), 24)
    with pytest.raises(UnsupportedModelError, match="w: groups of 48 activations do not divide 64"):
        load(weights, tensor)


def test_fp8_numbers_are_torchs() -> None:
    known: Mapping[CodeType, torch.dtype] = {
        CodeType.FP8_E4M3: torch.float8_e4m3fn,
        CodeType.FP8_E5M2: torch.float8_e5m2,
    }
    for code, dtype in known.items():
        numbers = torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()
        assert np.array_equal(numbers_of(code), numbers, equal_nan=True)
    assert numbers_of(CodeType.FP4_E2M1).tolist() == [
        *(0, 0.5, 1, 1.5, 2, 3, 4, 6),
        *(0, -0.5, -1, -1.5, -2, -3, -4, -6),
    ]


def test_parts_in_different_forms_lie_side_by_side() -> None:
    weights = Codes()
    tensors = [
        weights.add(name, form, 8) for name, form in zip("qkv", (*FORMS[:1] * 2, FORMS[3]), strict=True)
    ]
    linear = load(weights, *tensors, dtype=torch.float32)
    x = torch.randn(3, NUM_INPUTS)
    whole = torch.cat([weights.dequantized(tensor) for tensor in tensors])
    torch.testing.assert_close(linear.apply(x, context(torch.float32)), x @ whole.T)
    assert linear.metrics().num_parameters == 3 * 8 * NUM_INPUTS


@pytest.mark.parametrize(("length", "unit", "size"), [(8, 1, 3), (16, 4, 2), (16, 4, 8), (12, 4, 3)])
def test_shards_keep_units_whole(length: int, unit: int, size: int) -> None:
    parts = [Shard(rank, size).of(length, unit) for rank in range(size)]
    assert all(part.start % unit == part.stop % unit == 0 for part in parts)
    covered = sorted({index for part in parts for index in range(part.start, part.stop)})
    assert covered == list(range(length))
    has_copies = sum(part.stop - part.start for part in parts) > length
    assert has_copies == (length // unit < size)
