"""N:M sparsity by magnitude."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch
from hypothesis import given, settings, strategies as st

from sagellm.accel import MagnitudeSparsifier, SparseOutput, SparsifierProtocol, SparsityConfig, magnitude
from sagellm.accel.linear import (
    LinearContext,
    PackedLinear,
    PlainLinear,
    SparseLinear,
    WideRows,
    linear_methods,
)
from sagellm.accel.magnitude import pack_bits, unpack_bits, why_nothing_is_gained
from sagellm.core import InvalidInputError
from sagellm.testing.sparsifier import SparsifierContract

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class TestMagnitudeSparsifier(SparsifierContract):
    def make(self, config: SparsityConfig | None = None) -> SparsifierProtocol:
        return MagnitudeSparsifier(config)


def sparsifier(pattern="2:4"):
    return MagnitudeSparsifier(SparsityConfig(pattern=pattern))


def pruned(weight, pattern="2:4"):
    made = sparsifier(pattern)
    return made.densify(made.sparsify(weight))


def by_definition(weight, n, m):
    """Return what is kept of each group: a stable sort by magnitude keeps the first of equals first."""
    expected = torch.zeros_like(weight)
    for row, begin in itertools.product(range(len(weight)), range(0, weight.shape[1], m)):
        group = range(begin, begin + m)
        for column in sorted(group, key=lambda j: -abs(float(weight[row, j])))[:n]:
            expected[row, column] = weight[row, column]
    return expected


patterns = st.integers(2, 32).flatmap(lambda m: st.tuples(st.integers(1, m - 1), st.just(m)))


@settings(max_examples=60, deadline=None)
@given(
    pattern=patterns,
    num_rows=st.integers(1, 5),
    num_groups=st.integers(1, 4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    num_levels=st.sampled_from([2, 5, 1_000_000]),
    seed=st.integers(0, 2**31),
)
def test_the_largest_of_each_group_are_kept_and_of_equals_the_first(
    pattern, num_rows, num_groups, dtype, num_levels, seed
):
    n, m = pattern
    generator = torch.Generator().manual_seed(seed)
    levels = torch.randint(-num_levels, num_levels + 1, (num_rows, num_groups * m), generator=generator)
    weight = (levels / num_levels).to(dtype)
    output = sparsifier(f"{n}:{m}").sparsify(weight)
    kept = unpack_bits(output.mask, output.num_columns).view(num_rows, num_groups, m)
    assert bool((kept.sum(-1) == n).all())
    assert torch.equal(sparsifier(f"{n}:{m}").densify(output), by_definition(weight, n, m))


def test_equal_magnitudes_keep_the_lower_index_whatever_their_signs():
    weight = torch.tensor([[1.0, -1.0, 1.0, -1.0, 0.0, 2.0, -2.0, 2.0]])
    assert pruned(weight).tolist() == [[1, -1, 0, 0, 0, 2, -2, 0]]
    assert pruned(torch.zeros(1, 4)).tolist() == [[0, 0, 0, 0]]


@settings(max_examples=40, deadline=None)
@given(num_rows=st.integers(1, 4), num_columns=st.integers(1, 70), seed=st.integers(0, 2**31))
def test_bits_come_back(num_rows, num_columns, seed):
    bits = torch.rand(num_rows, num_columns, generator=torch.Generator().manual_seed(seed)) < 0.5
    packed = pack_bits(bits)
    assert packed.shape == (num_rows, -(-num_columns // 8))
    assert torch.equal(unpack_bits(packed, num_columns), bits)


@pytest.mark.parametrize(("pattern", "share"), [("2:4", 0.5), ("4:8", 0.5), ("1:4", 0.25)])
def test_an_output_takes_its_values_and_a_bit_for_each_column(pattern, share):
    weight = torch.randn(64, 256).bfloat16()
    output = sparsifier(pattern).sparsify(weight)
    assert output.num_bytes == weight.nbytes * share + weight.numel() // 8


def test_rows_that_take_many_slices_are_pruned_alike(monkeypatch):
    weight = torch.randn(50, 64)
    expected = pruned(weight)
    monkeypatch.setattr("sagellm.accel.slices.CPU_SLICE_BYTES", 64 * 16 * 3)
    assert torch.equal(pruned(weight), expected)
    made, x = sparsifier(), torch.randn(5, 64)
    product = made.linear(x, made.sparsify(weight), torch.ones(50))
    torch.testing.assert_close(product, x @ expected.T + 1)


@pytest.mark.parametrize("part", [lambda whole: whole[:, 8:24], lambda whole: whole.T])
def test_matrices_that_are_not_contiguous_are_pruned(part):
    weight = part(torch.randn(16, 32))
    expected = by_definition(weight, 2, 4)
    assert torch.equal(pruned(weight), expected)
    assert torch.equal(sparsifier().prune(weight), expected)


def test_the_row_of_a_bad_value_is_that_of_the_whole_matrix(monkeypatch):
    monkeypatch.setattr("sagellm.accel.slices.CPU_SLICE_BYTES", 8 * 16)
    weight = torch.randn(9, 8)
    weight[7, 3] = torch.nan
    with pytest.raises(InvalidInputError, match="row 7 of the weight holds NaN"):
        sparsifier().sparsify(weight)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (
            torch.ones(4, 10),
            "10 columns, which do not divide into groups of 4 .2:4.; pad them .* to 12",
        ),
        (torch.ones(4, 8, dtype=torch.int8), "torch.int8; only floating-point weights of 16 bits or more"),
        (torch.ones(8), r"shape \(8,\); it must have two dimensions"),
        (torch.ones(0, 8), r"shape \(0, 8\); it has no values"),
    ],
)
def test_an_error_says_what_is_wrong_and_what_to_do(weight, message):
    with pytest.raises(InvalidInputError, match=message):
        sparsifier().sparsify(weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_columns": 10}, "for 10 columns of 2:4"),
        ({"values": torch.ones(4, 3)}, r"values have shape \(4, 3\)"),
        ({"mask": torch.ones(3, 1, dtype=torch.uint8)}, r"the mask \(3, 1\)"),
        ({"mask": torch.ones(4, 1, dtype=torch.int32)}, "the mask is of torch.int32"),
        ({"mask": torch.full((4, 1), 7, dtype=torch.uint8)}, "marks 3 of 4 columns in row 0"),
    ],
)
def test_an_output_whose_parts_do_not_fit_is_refused(change, message):
    output = sparsifier().sparsify(torch.randn(4, 8))
    broken = SparseOutput(**{**vars(output), **change})
    with pytest.raises(InvalidInputError, match=message):
        sparsifier().densify(broken)
    with pytest.raises(InvalidInputError, match=message):
        sparsifier().linear(torch.ones(1, broken.num_columns), broken)


def test_what_gains_nothing_is_said_once(caplog):
    magnitude._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            sparsifier().sparsify(torch.ones(4, 8))
    (record,) = caplog.records
    assert record.name.startswith("sagellm.accel")
    assert "sparsity 2:4 saves no time here: cpu has no units for sparse products" in record.getMessage()


@pytest.mark.parametrize(
    ("pattern", "capability", "reason"),
    [
        ("2:4", (8, 0), None),
        ("2:4", (9, 0), None),
        ("2:4", (7, 5), "T4 has compute capability 7.5, and 8.0 is needed"),
        ("4:8", (9, 0), "GPUs multiply only 2:4 faster"),
        ("1:4", (7, 5), "GPUs multiply only 2:4 faster"),
    ],
)
def test_which_gpus_gain_what(monkeypatch, pattern, capability, reason):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "T4")
    told = why_nothing_is_gained(SparsityConfig(pattern=pattern), GPU)
    assert told is None if reason is None else reason in str(told)


class Recorded:
    """Stands for torch's conversion, which no CPU has: the weights that it was given."""

    def __init__(self, error=None):
        self.error, self.given = error, []

    def __call__(self, weight):
        if self.error is not None:
            raise self.error
        self.given.append(weight)
        return weight


@pytest.fixture
def sparse_units(monkeypatch):
    """Have this CPU pass for a GPU with sparse units."""
    recorded = Recorded()
    monkeypatch.setattr(magnitude, "why_nothing_is_gained", lambda config, device: None)
    monkeypatch.setattr(torch.sparse, "to_sparse_semi_structured", recorded)
    return recorded


@pytest.mark.parametrize(
    ("shape", "dtype", "has_kernel"),
    [
        ((64, 128), torch.float16, True),
        ((64, 128), torch.bfloat16, True),
        ((64, 128), torch.float32, False),
        ((48, 128), torch.float16, False),
        ((64, 96), torch.float16, False),
    ],
)
def test_torchs_kernels_take_16_bits_and_whole_tiles(sparse_units, shape, dtype, has_kernel):
    weight = pruned(torch.randn(shape).to(dtype))
    kernel = sparsifier().kernel(weight)
    assert (kernel is not None, len(sparse_units.given)) == (has_kernel, int(has_kernel))
    if kernel is not None:
        x, bias = torch.randn(3, shape[1]).to(dtype), torch.randn(shape[0]).to(dtype)
        assert torch.equal(kernel(x, bias), torch.nn.functional.linear(x, weight, bias))
        assert kernel(x[:0], bias).shape == (0, shape[0])


def test_a_weight_that_was_not_pruned_has_no_kernel(sparse_units):
    weight = pruned(torch.randn(64, 128).half())
    weight[5, 8:11] = 1
    assert sparsifier().kernel(weight) is None
    assert sparse_units.given == []


def test_without_torchs_kernels_weights_stay_dense(sparse_units, caplog):
    sparse_units.error = RuntimeError("cuSPARSELt not supported on your machine")
    assert sparsifier().kernel(torch.zeros(64, 128).half()) is None
    assert "cuSPARSELt not supported" in caplog.text


@pytest.mark.parametrize("has_kernel", [False, True])
def test_a_linear_of_pruned_weights_multiplies_by_the_kernel_if_there_is_one(sparse_units, has_kernel):
    made = sparsifier()
    weight, bias = pruned(torch.randn(64, 128 if has_kernel else 96).bfloat16()), torch.ones(64).bfloat16()
    linear = SparseLinear(CPU, made).adopt(weight, bias)
    assert len(sparse_units.given) == has_kernel
    x = torch.randn(3, weight.shape[1]).bfloat16()
    product = linear.apply(x, LinearContext(WideRows(torch.bfloat16, CPU)))
    torch.testing.assert_close(product, torch.nn.functional.linear(x, weight, bias))
    assert linear.metrics().num_parameters == weight.numel() + 64


def test_only_devices_with_kernels_are_asked_for_them():
    made = sparsifier()
    assert type(linear_methods(torch.float16, GPU, None, made)()) is SparseLinear
    assert type(linear_methods(torch.float16, GPU, None, None)()) is PlainLinear
    assert type(linear_methods(torch.float32, CPU, None, made)()) in (PlainLinear, PackedLinear)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_gpu_multiplies_by_24_as_by_the_dense_weight(dtype):
    if why_nothing_is_gained(SparsityConfig(), GPU):
        pytest.skip("needs compute capability 8.0")
    weight = pruned(torch.randn(256, 512).to(dtype)).to(GPU)
    linear = SparseLinear(GPU, sparsifier()).adopt(weight)
    context = LinearContext(WideRows(dtype, GPU))
    for num_tokens in (0, 1, 5, 8, 300):
        x = torch.randn(num_tokens, 512, device=GPU).to(dtype)
        product = linear.apply(x, context)
        torch.testing.assert_close(product.float(), x.float() @ weight.float().T, rtol=2e-2, atol=0.3)
