"""What every sparsifier must do. Subclass `SparsifierContract` and override `make`."""

from __future__ import annotations

from typing import Any

import pytest

from sagellm.core.errors import ConfigError, InvalidInputError
from sagellm.core.protocols.sparsifier import (
    SparseOutput,
    SparsifierMetrics,
    SparsifierProtocol,
    SparsityConfig,
)
from sagellm.testing.cost import least_cpu_ns, slowness

PATTERNS = ["2:4", "4:8", "1:4", "3:5", "1:2", "31:32"]
SHAPES = [(1, 2), (5, 6), (33, 7), (8, 1)]  # rows, and groups in a row


class SparsifierContract:
    """The contract of SparsifierProtocol as tests. Needs torch; skipped where there is none."""

    @pytest.fixture
    def torch(self) -> Any:
        """Return torch, which core itself does without."""
        return pytest.importorskip("torch")

    def make(self, config: SparsityConfig | None = None) -> SparsifierProtocol:
        """Return a fresh sparsifier."""
        raise NotImplementedError

    def weight(self, pattern: str, shape: tuple[int, int], dtype: str = "float32", seed: int = 0) -> Any:
        """Return random weights, of so many rows and groups of the pattern."""
        torch = pytest.importorskip("torch")
        size = shape[0], shape[1] * SparsityConfig(pattern=pattern).m
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(size, generator=generator).to(getattr(torch, dtype))

    def kept(self, output: SparseOutput) -> Any:
        """Return bool (out, in): the columns that the mask marks."""
        torch = pytest.importorskip("torch")
        bits = (output.mask.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1
        return bits.view(len(output.mask), -1).bool()

    @pytest.mark.parametrize("pattern", PATTERNS)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_exactly_n_of_each_m_columns_are_kept(
        self, torch: Any, pattern: str, shape: tuple[int, int]
    ) -> None:
        """Even where weights are zero or equal; bits beyond the last column are 0."""
        sparsifier, config = self.make(SparsityConfig(pattern=pattern)), SparsityConfig(pattern=pattern)
        number = config.n if sparsifier.prunes else config.m
        dense = self.weight(pattern, shape)
        for weight in (dense, torch.zeros_like(dense), torch.ones_like(dense), -dense.abs().floor()):
            output = sparsifier.sparsify(weight)
            kept = self.kept(output)
            assert output.mask.dtype == torch.uint8
            assert output.num_columns == weight.shape[1]
            assert not bool(kept[:, weight.shape[1] :].any())
            groups = kept[:, : weight.shape[1]].reshape(len(weight), -1, config.m)
            assert bool((groups.sum(-1) == number).all())
            assert tuple(output.values.shape) == (len(weight), groups.shape[1] * number)

    @pytest.mark.parametrize("pattern", PATTERNS)
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
    def test_what_is_kept_comes_back_bit_by_bit(self, torch: Any, pattern: str, dtype: str) -> None:
        """And zeros stand for the rest."""
        weight = self.weight(pattern, (9, 5), dtype)
        sparsifier = self.make(SparsityConfig(pattern=pattern))
        output = sparsifier.sparsify(weight)
        restored = sparsifier.densify(output)
        assert restored.dtype == weight.dtype
        kept = self.kept(output)[:, : weight.shape[1]]
        assert torch.equal(restored, torch.where(kept, weight, torch.zeros_like(weight)))
        assert torch.equal(output.values.reshape(-1), weight[kept])

    @pytest.mark.parametrize("pattern", PATTERNS)
    def test_what_has_the_pattern_already_is_left_as_it_is(self, torch: Any, pattern: str) -> None:
        """Pruning twice is pruning once."""
        sparsifier = self.make(SparsityConfig(pattern=pattern))
        once = sparsifier.prune(self.weight(pattern, (9, 5)))
        assert torch.equal(sparsifier.prune(once), once)

    @pytest.mark.parametrize("pattern", PATTERNS)
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_prune_is_sparsify_and_densify(self, torch: Any, pattern: str, dtype: str) -> None:
        """With the same bits and counts, and its input left alone."""
        one, two = (self.make(SparsityConfig(pattern=pattern)) for _ in range(2))
        weight = self.weight(pattern, (33, 7), dtype)
        copy = weight.clone()
        pruned = one.prune(weight)
        assert torch.equal(pruned, two.densify(two.sparsify(weight)))
        assert pruned.dtype == weight.dtype
        assert one.metrics() == two.metrics()
        assert torch.equal(weight, copy)
        with pytest.raises(InvalidInputError, match="row 1"):
            one.prune(torch.tensor([[1.0] * weight.shape[1], [float("nan")] * weight.shape[1]]))

    def test_rows_are_pruned_by_themselves(self, torch: Any) -> None:
        """So an engine may prune some at a time."""
        sparsifier, weight = self.make(), self.weight("2:4", (12, 6))
        parts = [sparsifier.prune(rows) for rows in weight.split([1, 7, 4])]
        assert torch.equal(torch.cat(parts), sparsifier.prune(weight))

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
    def test_weights_that_are_not_finite_are_refused(self, torch: Any, value: float) -> None:
        """NaN and infinities raise, name the row and count nothing."""
        sparsifier = self.make()
        weight = torch.ones(4, 8)
        weight[3, 5] = value
        with pytest.raises(InvalidInputError, match="row 3"):
            sparsifier.sparsify(weight)
        assert sparsifier.metrics() == SparsifierMetrics()

    def test_only_matrices_of_floats_are_accepted(self, torch: Any) -> None:
        """Integers, numbers of 8 bits, vectors, stacks of matrices and empty matrices raise."""
        dtypes = (torch.int8, torch.int32, torch.bool, torch.float8_e4m3fn)
        others = [torch.ones(4, 8).to(dtype) for dtype in dtypes]
        shapes = [(8,), (2, 4, 8), (0, 8), (4, 0)]
        for weight in [*others, *(torch.ones(shape) for shape in shapes)]:
            with pytest.raises(InvalidInputError):
                self.make().sparsify(weight)

    def test_columns_that_do_not_divide_say_to_which_multiple_to_pad(self, torch: Any) -> None:
        """100 columns in groups of 8 must become 104."""
        with pytest.raises(InvalidInputError, match="104"):
            self.make(SparsityConfig(pattern="4:8")).sparsify(torch.ones(4, 100))

    @pytest.mark.parametrize("pattern", PATTERNS)
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_linear_multiplies_by_what_the_output_stands_for(
        self, torch: Any, pattern: str, dtype: str
    ) -> None:
        """`linear` equals the product with the dense matrix, within x's own precision."""
        generator = torch.Generator().manual_seed(1)
        sparsifier = self.make(SparsityConfig(pattern=pattern))
        for shape, num_tokens in [(shape, number) for shape in SHAPES for number in (0, 1, 3, 17)]:
            weight = self.weight(pattern, shape, dtype)
            num_rows, num_columns = weight.shape
            output = sparsifier.sparsify(weight)
            x = torch.randn(num_tokens, num_columns, generator=generator).to(weight.dtype)
            for bias in (None, torch.randn(num_rows, generator=generator).to(weight.dtype)):
                product = sparsifier.linear(x, output, bias)
                expected = x.float() @ sparsifier.densify(output).float().T
                expected = expected if bias is None else expected + bias.float()
                assert product.dtype == x.dtype
                tolerance = 16 * torch.finfo(x.dtype).eps * num_columns**0.5
                torch.testing.assert_close(product.float(), expected, rtol=tolerance, atol=tolerance)

    def test_parts_that_do_not_fit_are_refused(self, torch: Any) -> None:
        """Values of another width, and activations of another one."""
        sparsifier = self.make()
        output = sparsifier.sparsify(torch.ones(4, 8))
        broken = SparseOutput(
            values=output.values[:, :3], mask=output.mask, num_columns=8, config=output.config
        )
        with pytest.raises(InvalidInputError):
            sparsifier.densify(broken)
        with pytest.raises(InvalidInputError):
            sparsifier.linear(torch.ones(1, 8), broken)
        for x in (torch.ones(2, 4), torch.ones(8)):
            with pytest.raises(InvalidInputError, match="8"):
                sparsifier.linear(x, output)

    @pytest.mark.parametrize("kind", ["pruned", "dense"])
    def test_a_kernel_multiplies_by_the_weight_as_it_is(self, torch: Any, kind: str) -> None:
        """Where there is one: on this device it may well be None, and a dense weight needs none."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        sparsifier = self.make()
        weight = self.weight("2:4", (128, 64), "float16").to(device)
        weight = sparsifier.prune(weight) if kind == "pruned" else weight
        kernel = sparsifier.kernel(weight)
        if kernel is None:
            return
        bias = torch.randn(128, dtype=weight.dtype, device=device)
        for num_tokens in (0, 1, 7, 64):
            x = torch.randn(num_tokens, weight.shape[1], dtype=weight.dtype, device=device)
            expected = x.float() @ weight.float().T + bias.float()
            product = kernel(x, bias)
            assert (product.dtype, tuple(product.shape)) == (x.dtype, (num_tokens, 128))
            torch.testing.assert_close(product.float(), expected, rtol=2e-2, atol=2e-1)

    def test_the_weight_itself_is_left_alone(self, torch: Any) -> None:
        """Pruning does not change its input."""
        weight = self.weight("2:4", (8, 4))
        copy = weight.clone()
        self.make().sparsify(weight)
        assert torch.equal(weight, copy)

    def test_metrics_count_what_was_pruned(self, torch: Any) -> None:
        """Each instance for itself; a refused weight counts nothing."""
        first, second = self.make(), self.make()
        assert first.metrics() == SparsifierMetrics()
        weight = self.weight("2:4", (8, 4))
        for sparsifier in (first, first, second):
            output = sparsifier.sparsify(weight)
        one, two = second.metrics(), first.metrics()
        assert (one.num_weights, one.num_kept) == (weight.numel(), output.values.numel())
        assert one.squares == pytest.approx(float(weight.double().square().sum()))
        assert one.kept_squares == pytest.approx(float(output.values.double().square().sum()))
        assert (two.num_weights, two.num_kept) == (2 * one.num_weights, 2 * one.num_kept)

    @pytest.mark.parametrize(
        "pattern", ["", "2", "2:", "4:4", "4:2", "0:4", "1:33", "2:4:8", " 2:4", "-1:4", 124, None]
    )
    def test_a_pattern_is_n_of_at_most_32(self, pattern: Any) -> None:
        """Written N:M, with 1 ≤ N < M ≤ 32."""
        with pytest.raises(ConfigError, match="pattern"):
            self.make(SparsityConfig(pattern=pattern))

    def test_pruning_a_million_weights_takes_under_two_seconds(self, torch: Any) -> None:
        """A generous budget: two seconds for what should take tens of milliseconds."""
        weight, sparsifier = torch.randn(1024, 1024), self.make()
        assert least_cpu_ns(lambda: sparsifier.sparsify(weight), 3) < 2e9 * slowness()
