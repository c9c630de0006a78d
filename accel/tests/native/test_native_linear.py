"""Products of the native library against float64 arithmetic, in each of its builds that this CPU runs."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sagellm.accel.native.library import NativeLibrary

Floats = NDArray[np.float32]

KINDS = {"bf16": 0, "int8": 1, "int4": 2, "f32": 3}


@pytest.fixture
def native(library: NativeLibrary) -> NativeLibrary:
    """The variant under test."""
    library.functions.sage_linear_create.restype = ctypes.c_void_p
    library.functions.sage_linear_pack_granularity.restype = ctypes.c_int64
    return library


def _bf16(x: Floats) -> Floats:
    """Round to the nearest bf16, ties to even."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def _groups(k: int, group: int) -> list[slice]:
    return [slice(begin, min(k, begin + group)) for begin in range(0, k, group)]


@dataclass
class Linear:
    """A packed weight beside what it stands for (n, k)."""

    library: NativeLibrary
    kind: str
    handle: ctypes.c_void_p
    values: Floats
    group: int
    bias: Floats | None
    is_gated: bool

    @property
    def width(self) -> int:
        return len(self.values) // (2 if self.is_gated else 1)

    def multiply(self, x: Floats, *, threads: int = 1, onto: Floats | None = None) -> Floats:
        """(rows, k) -> (rows, n or n / 2); `onto` is added to."""
        x = np.ascontiguousarray(x)
        out = np.full((len(x), self.width), np.nan, np.float32) if onto is None else onto.copy()
        handles = (ctypes.c_void_p * 1)(self.handle.value)
        self.library.functions.sage_linear_multiply(
            handles, ctypes.c_int64(1), x.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(len(x)),
            int(onto is not None), out.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(self.width),
            threads, None,
        )  # fmt: skip
        return out

    def unpacked(self) -> Floats:
        rows = np.empty_like(self.values)
        for output, row in enumerate(rows):
            self.library.functions.sage_linear_unpack_row(
                self.handle, ctypes.c_int64(output), row.ctypes.data_as(ctypes.c_void_p)
            )
        return rows

    def rounded(self, x: Floats) -> Floats:
        """What activations become: bf16 where CPUs multiply it, 8 bits per row (int8) or group (int4)."""
        if self.kind == "f32" or (self.kind == "bf16" and self.library.variant == "avx2"):
            return x
        if self.kind == "bf16":
            return _bf16(x)
        result = np.zeros_like(x)
        for part in _groups(x.shape[1], self.group if self.kind == "int4" else x.shape[1]):
            size = np.abs(x[:, part]).max(axis=1, keepdims=True)
            with np.errstate(divide="ignore", invalid="ignore"):
                quantized = np.where(size > 0, np.rint(x[:, part] * (np.float32(127) / size)), 0)
            result[:, part] = quantized * (size / np.float32(127))
        return result

    def expected(self, x: Floats) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The product in float64 and how far float32 sums may be from it.

        A float32 sum of k products errs by at most k 2^-24 of the sum of their sizes; errors of random signs
        grow with the root of k, which 2^-17 covers for each k here.
        """
        rounded, weights = self.rounded(x).astype(np.float64), self.values.astype(np.float64)
        product = rounded @ weights.T + (0 if self.bias is None else self.bias.astype(np.float64))
        slack = 2.0**-17 * (np.abs(rounded) @ np.abs(weights).T) + 1e-6 * np.abs(product)
        if not self.is_gated:
            return product, slack
        gate, up = product[:, : self.width], product[:, self.width :]
        hidden = gate / (1 + np.exp(-gate))
        return hidden * up, 1.1 * slack[:, : self.width] * (np.abs(up) + slack[:, self.width :]) + (
            np.abs(hidden) * slack[:, self.width :] + 1e-6 * np.abs(hidden * up)
        )


@dataclass
class Shape:
    n: int
    k: int
    group: int = 128
    is_gated: bool = False
    has_bias: bool = False


def _pack(library: NativeLibrary, kind: str, shape: Shape, *, piece: int | None = None) -> Linear:
    """A random weight, packed in two pieces as two threads would, or in pieces of so many outputs."""
    functions = library.functions
    random = np.random.default_rng(0)
    n, k = shape.n, shape.k
    bias = random.standard_normal(n).astype(np.float32) if shape.has_bias else None
    scales = np.zeros(0, np.float32)
    rows: Any
    if kind == "int8":
        rows = random.integers(-128, 128, (n, k)).astype(np.int8)
        scales = random.uniform(0.001, 0.01, n).astype(np.float32)
        values = rows * scales[:, None]
    elif kind == "int4":
        rows = random.integers(-8, 8, (n, k)).astype(np.int8)
        groups = _groups(k, shape.group)
        scales = random.uniform(0.01, 0.1, (n, len(groups))).astype(np.float32)
        values = np.concatenate(
            [rows[:, part] * scales[:, i : i + 1] for i, part in enumerate(groups)], axis=1
        )
    else:
        rows = values = (random.standard_normal((n, k)) / 8).astype(np.float32)
        if kind == "bf16":
            values = _bf16(values)
            rows = (values.view(np.uint32) >> 16).astype(np.uint16)
    bias_pointer = None if bias is None else bias.ctypes.data_as(ctypes.c_void_p)
    handle = ctypes.c_void_p(
        functions.sage_linear_create(
            KINDS[kind],
            int(shape.is_gated),
            ctypes.c_int64(n),
            ctypes.c_int64(k),
            ctypes.c_int64(shape.group),
            bias_pointer,
        )
    )
    half = min(
        n, n // 2 // functions.sage_linear_pack_granularity() * functions.sage_linear_pack_granularity()
    )
    cuts = [(half, n), (0, half)]
    if piece is not None:
        cuts = [(begin, min(begin + piece, n)) for begin in range(0, n, piece)]
    for begin, end in cuts:
        part, part_scales = np.ascontiguousarray(rows[begin:end]), np.ascontiguousarray(scales[begin:end])
        functions.sage_linear_pack(
            handle, ctypes.c_int64(begin), ctypes.c_int64(end - begin), part.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_int64(k), part_scales.ctypes.data_as(ctypes.c_void_p),
        )  # fmt: skip
    return Linear(library, kind, handle, values.astype(np.float32), shape.group, bias, shape.is_gated)


@pytest.fixture
def pack(native: NativeLibrary) -> Iterator[Any]:
    packed: list[Linear] = []

    def pack_one(kind: str, shape: Shape) -> Linear:
        packed.append(_pack(native, kind, shape))
        return packed[-1]

    yield pack_one
    for linear in packed:
        native.functions.sage_linear_free(linear.handle)


def _rows(num_rows: int, k: int) -> Floats:
    return np.random.default_rng(1).standard_normal((num_rows, k)).astype(np.float32)


def _assert_near(linear: Linear, x: Floats, result: Floats) -> None:
    expected, slack = linear.expected(x)
    error = np.abs(result - expected)
    assert (error <= slack).all(), f"{float((error / slack).max()):.3g} times the bound"


kinds = pytest.mark.parametrize("kind", KINDS)

SHAPES = {
    "even": Shape(64, 256),
    "ragged": Shape(37, 90),
    "narrow": Shape(3, 5),
    "bias": Shape(48, 192, has_bias=True),
    "gated": Shape(128, 128, is_gated=True),
    "gated ragged": Shape(2 * 41, 100, is_gated=True, has_bias=True),
    "group 32": Shape(40, 256, group=32),
    "group 96": Shape(33, 200, group=96),
    "deep": Shape(70, 2304),
    "so deep that k is cut": Shape(40, 6400),
    "one group": Shape(40, 100, group=100),
}


@kinds
@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
@pytest.mark.parametrize("num_rows", [1, 3, 8, 17, 33, 70])
def test_a_product_is_that_of_the_rounded_operands(pack: Any, kind: str, shape: Shape, num_rows: int) -> None:
    linear = pack(kind, shape)
    x = _rows(num_rows, shape.k)
    _assert_near(linear, x, linear.multiply(x))


@kinds
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("piece", [7, 24, 50])
def test_pieces_that_begin_within_a_panel_are_packed_alike(
    pack: Any, kind: str, piece: int, is_gated: bool
) -> None:
    shape = Shape(200, 90, is_gated=is_gated)
    whole = pack(kind, shape)
    pieces = _pack(whole.library, kind, shape, piece=piece)
    try:
        assert np.array_equal(pieces.unpacked(), whole.values)
        x = _rows(5, shape.k)
        assert np.array_equal(pieces.multiply(x), whole.multiply(x))
    finally:
        whole.library.functions.sage_linear_free(pieces.handle)


@kinds
def test_a_chunk_of_rows_too_large_for_the_caches_is_cut(pack: Any, kind: str) -> None:
    shape = Shape(160, 1100)
    linear = pack(kind, shape)
    x = _rows(1100, shape.k)
    _assert_near(linear, x, linear.multiply(x, threads=2))


@kinds
@pytest.mark.parametrize(
    "shape",
    [Shape(80, 1216), Shape(64, 320, group=32, is_gated=True, has_bias=True), Shape(70, 6400)],
    ids=["plain", "gated", "cut"],
)
def test_a_product_has_the_same_bits_alone_and_batched(pack: Any, kind: str, shape: Shape) -> None:
    linear = pack(kind, shape)
    x = _rows(130, shape.k)
    together = linear.multiply(x)
    for num_rows in (1, 2, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 64, 65, 97):
        first = len(x) - num_rows
        assert np.array_equal(linear.multiply(x[first:]), together[first:]), f"{num_rows} rows"


@kinds
@pytest.mark.parametrize("num_rows", [1, 16, 70])
def test_a_product_has_the_same_bits_with_any_number_of_threads(pack: Any, kind: str, num_rows: int) -> None:
    linear = pack(kind, Shape(300, 160))
    x = _rows(num_rows, 160)
    alone = linear.multiply(x)
    assert np.array_equal(linear.multiply(x, threads=2), alone)
    assert np.array_equal(linear.multiply(x, threads=3), alone)


@kinds
def test_a_product_can_be_added_to_what_is_there(pack: Any, kind: str) -> None:
    linear = pack(kind, Shape(45, 70))
    x, residual = _rows(5, 70), np.random.default_rng(2).standard_normal((5, 45)).astype(np.float32)
    assert np.array_equal(linear.multiply(x, onto=residual), residual + linear.multiply(x))


@kinds
@pytest.mark.parametrize("shape", [SHAPES["ragged"], SHAPES["gated ragged"], SHAPES["group 96"]])
def test_unpacking_returns_what_was_packed(pack: Any, kind: str, shape: Shape) -> None:
    linear = pack(kind, shape)
    assert np.array_equal(linear.unpacked(), linear.values)


@kinds
@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("num_rows", [3, 20, 40])
def test_a_broken_row_does_not_touch_its_neighbours(
    pack: Any, kind: str, broken: float, num_rows: int
) -> None:
    linear = pack(kind, Shape(40, 130))
    x = _rows(num_rows, 130)
    whole = linear.multiply(x)
    x[1, 7] = broken
    result = linear.multiply(x)
    assert not np.isfinite(result[1]).any()
    assert np.array_equal(np.delete(result, 1, axis=0), np.delete(whole, 1, axis=0))


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_rows_of_zeros_and_of_tiny_values_are_quantized(pack: Any, kind: str) -> None:
    linear = pack(kind, Shape(40, 256))
    x = _rows(4, 256)
    x[0] = 0
    x[1] *= np.float32(1e-37)
    x[2] *= np.float32(1e30)
    result = linear.multiply(x)
    assert not result[0].any()
    assert np.abs(result[1]).max() < 1e-30
    _assert_near(linear, x[2:], result[2:])


@pytest.mark.parametrize(("kind", "most"), [("int8", 0.012), ("int4", 0.008)])
def test_quantized_activations_cost_little_accuracy(pack: Any, kind: str, most: float) -> None:
    # Rounding to steps of max / 127, the max of 2,048 normal values near 3.5 deviations, of 128 near 2.7.
    linear = pack(kind, Shape(96, 2048))
    x = _rows(9, 2048)
    exact = x.astype(np.float64) @ linear.values.astype(np.float64).T
    error = linear.multiply(x) - exact
    assert np.sqrt((error**2).mean() / (exact**2).mean()) < most
