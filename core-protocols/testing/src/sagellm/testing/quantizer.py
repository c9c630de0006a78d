"""What every quantizer must do. Subclass `QuantizerContract` and override `make`."""

from __future__ import annotations

from typing import Any

import pytest

from sagellm.core.errors import ConfigError, InvalidInputError
from sagellm.core.protocols.quantizer import (
    QuantizationConfig,
    QuantizationGranularity,
    QuantizationOutput,
    QuantizerMetrics,
    QuantizerProtocol,
)
from sagellm.core.protocols.weight_form import CodeType
from sagellm.testing.cost import least_cpu_ns, slowness

GRANULARITIES = list(QuantizationGranularity)
SHAPES = [(1, 8), (8, 8), (7, 24), (64, 48), (33, 136)]


_VALUES = {
    CodeType.INT4: ("int8", -8, 7),
    CodeType.INT8: ("int8", -128, 127),
    CodeType.FP8_E4M3: ("float8_e4m3fn", -448, 448),
    CodeType.FP8_E5M2: ("float8_e5m2", -57344, 57344),
}
"""The dtype, the least and the largest of the values in each form that a quantizer may name."""


def max_error_steps(weight: Any, restored: Any, scales: Any, relative: float = 0.0) -> float:
    """Return the largest |weight − restored| in units of the scale that covers it.

    That which is `relative` to |weight| is left out.
    """
    num_rows = weight.shape[0]
    steps = scales.expand(num_rows, scales.shape[1])[:, :, None]
    error = (weight.double() - restored.double()).abs() - relative * weight.double().abs()
    return float((error.reshape(num_rows, steps.shape[1], -1) / steps.double()).max())


class QuantizerContract:
    """The contract of QuantizerProtocol as tests. Needs torch; skipped where there is none."""

    ROUNDING = 2e-5  # of a float32 quotient, in steps

    @pytest.fixture
    def torch(self) -> Any:
        """Return torch, which core itself does without."""
        return pytest.importorskip("torch")

    def make(self, config: QuantizationConfig | None = None) -> QuantizerProtocol:
        """Return a fresh quantizer."""
        raise NotImplementedError

    def config(self, granularity: QuantizationGranularity, clip_ratio: float = 1.0) -> QuantizationConfig:
        """Return a configuration whose groups divide all shapes of this kit."""
        return QuantizationConfig(granularity=granularity, group_size=8, clip_ratio=clip_ratio)

    def quantize(self, quantizer: QuantizerProtocol, weight: Any) -> tuple[QuantizationOutput, Any]:
        """Quantize; return the output and the matrix that it represents in float32."""
        output = quantizer.quantize(weight)
        return output, quantizer.dequantize(output, pytest.importorskip("torch").float32)

    @pytest.mark.parametrize("granularity", GRANULARITIES)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_a_round_trip_stays_within_the_error_that_is_stated(
        self, torch: Any, granularity: QuantizationGranularity, shape: tuple[int, int]
    ) -> None:
        """Every weight comes back within `most_error_steps` scales and `most_relative_error` of itself."""
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        quantizer = self.make(self.config(granularity))
        output, restored = self.quantize(quantizer, weight)
        assert restored.shape == weight.shape
        assert restored.dtype == torch.float32
        found = max_error_steps(weight, restored, output.scales, quantizer.most_relative_error)
        assert found <= quantizer.most_error_steps + self.ROUNDING

    @pytest.mark.parametrize("granularity", GRANULARITIES)
    def test_scales_have_two_dimensions(self, torch: Any, granularity: QuantizationGranularity) -> None:
        """Scales and zeros broadcast over (out, groups) whatever the granularity."""
        output = self.make(self.config(granularity)).quantize(torch.randn(6, 16))
        assert tuple(output.scales.shape) in {(1, 1), (6, 1), (6, 2)}
        assert tuple(output.values.shape) == (6, 16)
        assert output.zeros is None or output.zeros.shape == output.scales.shape
        assert output.zeros is None or output.zeros.dtype == torch.int8

    @pytest.mark.parametrize("granularity", GRANULARITIES)
    def test_an_output_stands_for_values_less_zeros_times_scales(
        self, torch: Any, granularity: QuantizationGranularity
    ) -> None:
        """Whoever stores or multiplies an output without its quantizer gets the same matrix."""
        generator = torch.Generator().manual_seed(3)
        weight = torch.randn(6, 16, generator=generator) + 0.5
        output, restored = self.quantize(self.make(self.config(granularity)), weight)
        groups = output.values.float().reshape(6, output.scales.shape[1], -1)
        zeros = 0 if output.zeros is None else output.zeros.float().unsqueeze(-1)
        product = (groups - zeros) * output.scales.float().unsqueeze(-1)
        torch.testing.assert_close(restored, product.reshape(6, 16), rtol=1e-6, atol=0)

    @pytest.mark.parametrize("granularity", GRANULARITIES)
    def test_rows_of_zeros_come_back_as_zeros(self, torch: Any, granularity: QuantizationGranularity) -> None:
        """No scale is zero, which prevents division by zero."""
        weight = torch.randn(5, 16)
        weight[2] = 0
        output, restored = self.quantize(self.make(self.config(granularity)), weight)
        assert bool((restored[2] == 0).all())
        assert bool((output.scales > 0).all())
        zeros = torch.zeros(4, 8)
        assert bool((self.quantize(self.make(self.config(granularity)), zeros)[1] == 0).all())

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
    def test_weights_that_are_not_finite_are_refused(self, torch: Any, value: float) -> None:
        """NaN and infinities raise and count nothing."""
        quantizer = self.make()
        weight = torch.ones(4, 8)
        weight[3, 5] = value
        with pytest.raises(InvalidInputError):
            quantizer.quantize(weight)
        assert quantizer.metrics().num_tensors == 0

    def test_only_matrices_of_floats_are_accepted(self, torch: Any) -> None:
        """Integers, vectors, stacks of matrices and empty matrices raise."""
        wrong = [torch.ones(4, 8, dtype=torch.int32), torch.ones(8), torch.ones(2, 4, 8), torch.ones(0, 8)]
        for weight in wrong:
            with pytest.raises(InvalidInputError):
                self.make().quantize(weight)

    def test_columns_that_do_not_divide_say_to_which_multiple_to_pad(self, torch: Any) -> None:
        """100 columns in groups of 8 must become 104."""
        with pytest.raises(InvalidInputError, match="104"):
            self.make(self.config(QuantizationGranularity.PER_GROUP)).quantize(torch.ones(4, 100))

    @pytest.mark.parametrize("granularity", GRANULARITIES)
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_linear_multiplies_by_what_the_output_stands_for(
        self, torch: Any, granularity: QuantizationGranularity, dtype: str
    ) -> None:
        """`linear` equals the product with the dequantized matrix, within x's own precision."""
        generator = torch.Generator().manual_seed(1)
        quantizer = self.make(self.config(granularity))
        for (num_rows, num_columns), num_tokens in [(shape, n) for shape in SHAPES for n in (0, 1, 3, 17)]:
            output, restored = self.quantize(
                quantizer, torch.randn(num_rows, num_columns, generator=generator)
            )
            bias = torch.randn(num_rows, generator=generator)
            x = torch.randn(num_tokens, num_columns, generator=generator).to(getattr(torch, dtype))
            product = quantizer.linear(x, output, bias.to(x.dtype))
            expected = x.float() @ restored.T + bias.to(x.dtype).float()
            assert product.dtype == x.dtype
            tolerance = 16 * torch.finfo(x.dtype).eps * num_columns**0.5
            torch.testing.assert_close(product.float(), expected, rtol=tolerance, atol=tolerance)

    @pytest.mark.parametrize("granularity", GRANULARITIES)
    def test_a_form_for_kernels_is_what_quantize_makes(
        self, torch: Any, granularity: QuantizationGranularity
    ) -> None:
        """Kernels that go by `integer_form` make the same values by the same scales."""
        weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(2))
        quantizer = self.make(self.config(granularity, clip_ratio=0.9))
        form = quantizer.integer_form(16)
        if form is None:
            return
        output = quantizer.quantize(weight)
        assert output.zeros is None
        lowest, highest = {8: (-127, 127), 4: (-8, 7)}[form.bits]
        groups = weight.view(8, 16 // form.group_size if form.group_size else 1, -1)
        assert output.scales.shape == groups.shape[:2]
        widest = groups.abs().amax(-1) * (form.clip_ratio / highest)
        if not form.searches_scales:
            assert bool(((output.scales >= widest) & (output.scales <= widest * (1 + 2**-7))).all())
        values = (groups / output.scales.unsqueeze(-1)).round().clamp(lowest, highest)
        assert torch.equal(output.values.view_as(values).to(values.dtype), values)

    @pytest.mark.parametrize("granularity", GRANULARITIES)
    def test_a_form_of_a_checkpoint_is_that_of_the_values(
        self, torch: Any, granularity: QuantizationGranularity
    ) -> None:
        """What `weight_form` says of codes, groups and zeros is what `quantize` makes."""
        quantizer = self.make(self.config(granularity))
        form = quantizer.weight_form(16)
        if form is None:
            return
        output = quantizer.quantize(torch.randn(6, 16, generator=torch.Generator().manual_seed(4)))
        dtype, lowest, highest = _VALUES[form.code]
        assert output.values.dtype == getattr(torch, dtype)
        assert bool(((output.values.float() >= lowest) & (output.values.float() <= highest)).all())
        assert output.scales.shape[1] == form.num_groups(16)
        assert (output.zeros is not None) == form.has_zeros

    def test_the_weight_itself_is_left_alone(self, torch: Any) -> None:
        """Quantizing does not change its input."""
        weight = torch.randn(8, 16)
        copy = weight.clone()
        self.make(self.config(QuantizationGranularity.PER_CHANNEL, clip_ratio=0.5)).quantize(weight)
        assert torch.equal(weight, copy)

    def test_equal_weights_give_equal_outputs(self, torch: Any) -> None:
        """Two instances share nothing and agree."""
        weight = torch.randn(8, 16)
        first, second = self.make(), self.make()
        one, two = first.quantize(weight), second.quantize(weight)
        assert torch.equal(one.values.view(torch.uint8), two.values.view(torch.uint8))
        assert torch.equal(one.scales, two.scales)
        assert one.zeros is two.zeros or torch.equal(one.zeros, two.zeros)
        first.quantize(weight)
        assert (first.metrics().num_tensors, second.metrics().num_tensors) == (2, 1)

    def test_metrics_count_bytes_and_the_largest_error(self, torch: Any) -> None:
        """They reflect what was quantized."""
        quantizer = self.make()
        assert quantizer.metrics() == QuantizerMetrics()
        weight = torch.randn(8, 16)
        output = quantizer.quantize(weight)
        metrics = quantizer.metrics()
        assert metrics.num_tensors == 1
        assert metrics.original_bytes == weight.nbytes
        assert metrics.quantized_bytes in (output.num_bytes, output.values.nbytes)
        most = quantizer.most_error_steps + self.ROUNDING
        most += quantizer.most_relative_error * float(weight.abs().max() / output.scales.min())
        assert 0 <= metrics.max_error_steps <= most

    @pytest.mark.parametrize("clip_ratio", [0.0, -0.5, 1.0001, float("nan"), "1"])
    def test_a_clip_ratio_outside_its_range_is_refused(self, clip_ratio: float) -> None:
        """The range is (0, 1]."""
        with pytest.raises(ConfigError, match="clip_ratio"):
            self.make(QuantizationConfig(clip_ratio=clip_ratio))

    @pytest.mark.parametrize("group_size", [0, -8, 1.5, None, True])
    def test_a_group_needs_a_whole_number_of_weights(self, group_size: int) -> None:
        """A group size is an integer of at least one."""
        with pytest.raises(ConfigError, match="group_size"):
            self.make(
                QuantizationConfig(granularity=QuantizationGranularity.PER_GROUP, group_size=group_size)
            )

    def test_quantizing_a_million_weights_takes_under_two_seconds(self, torch: Any) -> None:
        """A generous budget: two seconds for what should take tens of milliseconds."""
        weight, quantizer = torch.randn(1024, 1024), self.make()
        assert least_cpu_ns(lambda: quantizer.quantize(weight), 3) < 2e9 * slowness()
