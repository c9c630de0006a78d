"""Weights that stay codes: their products are bit by bit those of the weights that they stand for."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sagellm.accel.coded import expand, numbers_of
from sagellm.accel.native.library import NativeLibrary
from sagellm.accel.native.structures import CodedRows as GivenRows, Linear
from sagellm.accel.native.weights import CODES, given_rows
from sagellm.core.protocols.weight_form import CodedRows, CodeType, WeightForm

Floats = NDArray[np.float32]
KINDS = {"bf16": 0, "f32": 3}
NUMBERS = {**KINDS, "int4": 2, "int8_groups": 4, "int6": 5}


def form(
    code: CodeType,
    group: int = 0,
    *,
    has_zeros: bool = False,
    has_offsets: bool = False,
    scale_group: int = 0,
) -> WeightForm:
    return WeightForm(
        code=code, group_size=group, has_zeros=has_zeros, has_offsets=has_offsets, scale_group=scale_group
    )


FORMS = [
    *(form(code) for code in CodeType),
    *(form(code, 32) for code in CodeType),
    form(CodeType.INT4, 128, has_zeros=True),
    form(CodeType.INT4, 32, has_zeros=True, has_offsets=True),
    form(CodeType.INT8, 16),
    form(CodeType.INT8, 48, has_offsets=True),
    form(CodeType.FP8_E4M3, 64, has_zeros=True),
    form(CodeType.INT4, 16),
    form(CodeType.UINT4, 32, has_offsets=True, scale_group=96),
    form(CodeType.INT6, 16, scale_group=48),
    form(CodeType.INT6, 48, has_offsets=True, scale_group=48),
    form(CodeType.INT8, 64, has_zeros=True, has_offsets=True, scale_group=128),
]


@pytest.fixture
def functions(library: NativeLibrary) -> Any:
    """The functions of the variant under test."""
    library.functions.sage_linear_create.restype = ctypes.c_void_p
    library.functions.sage_linear_create_coded.restype = ctypes.c_void_p
    library.functions.sage_linear_bytes.restype = ctypes.c_int64
    return library.functions


def pointer(array: NDArray[Any] | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if array is None else array.ctypes.data)


def to_bf16(x: Floats) -> NDArray[np.uint16]:
    """Round to the nearest bf16, ties to even."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


@dataclass
class Product:
    """A packed weight of a variant."""

    functions: Any
    handle: ctypes.c_void_p
    shape: tuple[int, int]
    is_gated: bool

    def multiply(self, x: Floats, threads: int = 1) -> Floats:
        width = self.shape[0] // (2 if self.is_gated else 1)
        out = np.full((len(x), width), np.nan, np.float32)
        handles = (ctypes.c_void_p * 1)(self.handle.value)
        self.functions.sage_linear_multiply(
            handles, ctypes.c_int64(1), pointer(x), ctypes.c_int64(len(x)), 0, pointer(out),
            ctypes.c_int64(width), threads, None,
        )  # fmt: skip
        return out

    def unpacked(self) -> Floats:
        rows = np.empty(self.shape, np.float32)
        for output, row in enumerate(rows):
            self.functions.sage_linear_unpack_row(self.handle, ctypes.c_int64(output), pointer(row))
        return rows

    def free(self) -> None:
        self.functions.sage_linear_free(self.handle)


def random_rows(form: WeightForm, shape: tuple[int, int], scales: Any = np.float32) -> CodedRows:
    random = np.random.default_rng(0)
    (n, k), groups = shape, form.num_groups(shape[1])
    codes = random.integers(0, 256, (n, k * form.code.bits // 8), np.uint8)
    if form.code.bits == 8:
        codes[~np.isfinite(numbers_of(form.code))[codes]] = 1
    if form.code is CodeType.INT6:
        codes = (codes.view(np.int8) >> 2).view(np.uint8)
    if form.scale_group:
        several = (n, k // form.scale_group)
        return CodedRows(
            codes=codes,
            scales=random.integers(-128, 128, (n, groups), np.int8),
            zeros=random.integers(-8, 8, (n, groups), np.int8) if form.has_zeros else None,
            offsets=random.integers(0, 64, (n, groups), np.int8) if form.has_offsets else None,
            factors=random.uniform(0.0001, 0.001, several).astype(np.float16),
            offset_factors=random.uniform(0.001, 0.01, several).astype(np.float16)
            if form.has_offsets
            else None,
        )
    return CodedRows(
        codes=codes,
        scales=random.uniform(0.001, 0.01, (n, groups)).astype(scales),
        zeros=random.integers(-8, 8, (n, groups), np.int8) if form.has_zeros else None,
        offsets=random.random((n, groups), np.float32) if form.has_offsets else None,
    )


def coded(
    functions: Any, kind: str, form: WeightForm, rows: CodedRows, *, is_gated: bool = False, piece: int = 32
) -> Product:
    n, k = len(rows.codes), rows.codes.shape[1] * 8 // form.code.bits
    has_half_scales = rows.scales.dtype == np.float16
    linear = Linear(
        kind=NUMBERS[kind], is_gated=is_gated, n=n, k=k, group=form.group_size, scale_group=form.scale_group,
        code=CODES[form.code] if kind in KINDS else 0, has_half_scales=has_half_scales,
        has_zeros=form.has_zeros, has_offsets=form.has_offsets, is_unsigned=form.code is CodeType.UINT4,
    )  # fmt: skip
    handle = ctypes.c_void_p(functions.sage_linear_create_coded(ctypes.byref(linear)))
    for begin in range(0, n, piece):
        arrays = given_rows(rows[begin : begin + piece], form, has_half_scales=has_half_scales)
        given = GivenRows(*(pointer(each) for each in arrays))
        count = min(piece, n - begin)
        functions.sage_linear_pack_codes(
            handle, ctypes.c_int64(begin), ctypes.c_int64(count), ctypes.byref(given)
        )
    return Product(functions, handle, (n, k), is_gated)


def plain(functions: Any, kind: str, values: Floats, *, is_gated: bool = False) -> Product:
    (n, k), rows = values.shape, to_bf16(values) if kind == "bf16" else values
    handle = ctypes.c_void_p(
        functions.sage_linear_create(
            KINDS[kind], is_gated, ctypes.c_int64(n), ctypes.c_int64(k), ctypes.c_int64(0), None
        )
    )
    functions.sage_linear_pack(
        handle, ctypes.c_int64(0), ctypes.c_int64(n), pointer(rows), ctypes.c_int64(k), None
    )
    return Product(functions, handle, values.shape, is_gated)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_products_have_the_bits_of_the_weights(functions: Any, form: WeightForm, kind: str) -> None:
    shape = (70, 144 if form.scale_group == 48 else 96 if form.group_size in (0, 16, 32, 48) else 256)
    rows = random_rows(form, shape)
    one, other = coded(functions, kind, form, rows), plain(functions, kind, expand(rows, form))
    assert np.array_equal(one.unpacked(), other.unpacked())
    for num_rows in (1, 3, 17, 70):
        x = np.random.default_rng(num_rows).standard_normal((num_rows, shape[1]), np.float32)
        assert np.array_equal(one.multiply(x), other.multiply(x))
        assert np.array_equal(one.multiply(x, threads=2), other.multiply(x))
    one.free()
    other.free()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("piece", [7, 32, 200])
def test_gates_and_pieces_of_any_size(functions: Any, kind: str, piece: int) -> None:
    for each in (
        form(CodeType.INT4, 32, has_zeros=True),
        form(CodeType.INT8, 16),
        form(CodeType.INT6, 16, scale_group=32),
    ):
        rows = random_rows(each, (2 * 50, 96))
        one = coded(functions, kind, each, rows, is_gated=True, piece=piece)
        other = plain(functions, kind, expand(rows, each), is_gated=True)
        x = np.random.default_rng(0).standard_normal((40, 96), np.float32)
        assert np.array_equal(one.multiply(x), other.multiply(x))
        one.free()
        other.free()


def test_half_scales_stay_half(functions: Any) -> None:
    each = form(CodeType.INT8, 32)
    halves = random_rows(each, (64, 96), np.float16)
    wide = CodedRows(codes=halves.codes, scales=halves.scales.astype(np.float32))
    one, other = coded(functions, "bf16", each, halves), coded(functions, "bf16", each, wide)
    assert np.array_equal(one.unpacked(), other.unpacked())
    assert functions.sage_linear_bytes(one.handle) == 64 * 96 + 64 * 3 * 2
    assert functions.sage_linear_bytes(other.handle) == 64 * 96 + 64 * 3 * 4
    one.free()
    other.free()


def test_a_row_has_the_same_bits_in_any_company(functions: Any) -> None:
    each = form(CodeType.INT4, 32)
    weight = coded(functions, "bf16", each, random_rows(each, (64, 4096)))
    x = np.random.default_rng(0).standard_normal((100, 4096), np.float32)
    together = weight.multiply(x)
    for row in (0, 50, 99):
        assert np.array_equal(weight.multiply(x[row : row + 1])[0], together[row])
    weight.free()


@pytest.mark.parametrize("group", [0, 16, 24])
@pytest.mark.parametrize("scale", [0.0, 0.03])
@pytest.mark.parametrize("code", [CodeType.INT8, CodeType.FP8_E4M3], ids=str)
def test_activations_are_rounded_as_torch_rounds_them(
    functions: Any, code: CodeType, group: int, scale: float
) -> None:
    import torch

    x = np.random.default_rng(0).standard_normal((5, 48), np.float32) * np.float32(2)
    x[1] *= np.geomspace(1e-6, 10, 48, dtype=np.float32)
    x[2] = 0
    rounded = np.empty_like(x)
    for row, out in zip(x, rounded, strict=True):
        functions.sage_linear_round_row(
            CODES[code], ctypes.c_int64(group), ctypes.c_float(scale), pointer(row), ctypes.c_int64(48),
            pointer(out),
        )  # fmt: skip
    groups = torch.from_numpy(x).view(5, -1, group or 48)
    limit = 127.0 if code is CodeType.INT8 else 448.0
    scales = torch.full((5, 1, 1), scale) if scale else groups.abs().amax(-1, keepdim=True) / limit
    quotient = (groups / scales.clamp(min=1e-30)).clamp(-limit, limit)
    codes = quotient.round() if code is CodeType.INT8 else quotient.to(torch.float8_e4m3fn).float()
    assert np.array_equal(rounded, (codes * scales).view(5, 48).numpy())


INTEGERS = [
    ("int4", form(CodeType.INT4)),
    ("int4", form(CodeType.INT4, 32, has_offsets=True)),
    ("int4", form(CodeType.INT4, 128, has_zeros=True)),
    ("int4", form(CodeType.INT4, 96, has_zeros=True, has_offsets=True)),
    ("int8_groups", form(CodeType.INT8, 16, has_offsets=True)),
    ("int8_groups", form(CodeType.INT8, 32)),
    ("int8_groups", form(CodeType.INT8, 48)),
    ("int8_groups", form(CodeType.INT8, has_zeros=True)),
    ("int8_groups", form(CodeType.INT8, 64, has_zeros=True, has_offsets=True)),
    ("int8_groups", form(CodeType.INT8, 32, has_offsets=True, scale_group=96)),
    ("int4", form(CodeType.UINT4, 32, has_offsets=True)),
    ("int4", form(CodeType.UINT4, 32, has_offsets=True, scale_group=128)),
    ("int4", form(CodeType.UINT4, 96, has_zeros=True, has_offsets=True, scale_group=192)),
    ("int6", form(CodeType.INT6, 16, scale_group=128)),
    ("int6", form(CodeType.INT6, 48, scale_group=384)),
    ("int6", form(CodeType.INT6, 32, has_zeros=True)),
    ("int6", form(CodeType.INT6, has_offsets=True)),
]


def rounded(x: Floats, form: WeightForm) -> Floats:
    """Round activations to 8 bits, with a scale for each group of the weight."""
    groups = x.reshape(len(x), form.num_groups(x.shape[1]), -1)
    largest = np.abs(groups).max(-1, keepdims=True)
    codes = np.rint(groups * (np.float32(127) / largest))
    return (codes * (largest / np.float32(127))).reshape(x.shape)


@pytest.mark.parametrize("scales", [np.float16, np.float32])
@pytest.mark.parametrize(("kind", "form"), INTEGERS, ids=str)
def test_integers_are_multiplied_by_rounded_activations(
    functions: Any, kind: str, form: WeightForm, scales: Any
) -> None:
    shape = (70, 384)
    rows = random_rows(form, shape, scales)
    weight, values = coded(functions, kind, form, rows), expand(rows, form)
    np.testing.assert_array_equal(weight.unpacked(), values)
    x = np.random.default_rng(0).standard_normal((70, shape[1]), np.float32)
    expected = rounded(x, form).astype(np.float64) @ values.T.astype(np.float64)
    together = weight.multiply(x)
    np.testing.assert_allclose(together, expected, rtol=0, atol=2e-6 * np.abs(expected).max())
    for num_rows in (1, 2, 3, 8, 17):
        assert np.array_equal(weight.multiply(x[:num_rows], threads=2), together[:num_rows])
    weight.free()
