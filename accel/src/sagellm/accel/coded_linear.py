"""Linear layers over weights as their checkpoint stores them quantized, on any device of torch."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from sagellm.accel.activations import check_activation_form, fake_quantized
from sagellm.accel.coded import numbers_of
from sagellm.accel.linear import LinearContext, PlainLinear
from sagellm.accel.row_padding import padded_linear
from sagellm.accel.slices import row_slices
from sagellm.accel.weights import WeightReader
from sagellm.core import WHOLE, InvalidInputError, Shard, UnsupportedModelError
from sagellm.core.protocols.model_spec import FusedLinear
from sagellm.core.protocols.weight_form import CodeType

_FLOATS = {CodeType.FP8_E4M3: torch.float8_e4m3fn, CodeType.FP8_E5M2: torch.float8_e5m2}


class CodedLinear(PlainLinear):
    """The codes and scales of a `WeightForm`, expanded a slice at a time when they are multiplied.

    The product is that of the weights rounded to x's dtype: bit by bit what `PlainLinear` computes from the
    dequantized checkpoint, except where products depend on the number of outputs at once. With activations
    that are rounded too, it is that of the numbers which both stand for, in float32 (`quantized_linear`).
    """

    def create(self, linear: FusedLinear, shard: Shard, dtype: torch.dtype) -> None:
        """Allocate what the parts, all in one form, are stored as. Raises UnsupportedModelError."""
        assert shard == WHOLE, "the backend refuses shards"
        form = linear.form
        assert form is not None, "plain weights have other methods"
        if form.activations is not None:
            try:
                check_activation_form(form.activations, linear.shape[1])
            except InvalidInputError as error:
                raise UnsupportedModelError(f"{linear.parts[0].weight.name}: {error}") from error
        self._form, self._parts, self._num_missing = form, linear.parts, len(linear.parts)
        num_outputs, num_inputs = self._shape = linear.shape
        self._num_groups = form.num_groups(num_inputs)
        scales = (num_outputs, self._num_groups)
        self._codes = self._zeroed((num_outputs, num_inputs * form.code.bits // 8), torch.uint8)
        self._scales = self._zeroed(scales, torch.float32)
        self._zeros = self._zeroed(scales, torch.int8) if form.has_zeros else None
        self._offsets = self._zeroed(scales, torch.float32) if form.has_offsets else None
        order = linear.parts[0].order
        self._places = None if order is None else torch.from_numpy(np.argsort(order)).to(self._device)
        self._table = torch.from_numpy(numbers_of(form.code)).to(self._device)
        self._bias = self._zeroed((num_outputs,), dtype) if linear.has_bias else None

    def load(self, part: int, weights: WeightReader) -> None:
        """Copy a part's codes and scales to their place."""
        read = self._parts[part]
        for begin, rows in weights.source.coded_pieces(read.weight):
            first = read.outputs.start + begin
            place = slice(first, first + len(rows.codes))
            _copy(self._codes[place], rows.codes.view(np.uint8))
            _copy(self._scales[place], rows.whole_scales())
            if self._zeros is not None and rows.zeros is not None:
                _copy(self._zeros[place], rows.zeros)
            offsets = rows.whole_offsets()
            if self._offsets is not None and offsets is not None:
                _copy(self._offsets[place], offsets)
            del rows  # before the next piece is made: a view keeps pages of the file in memory
        self._end_part(read, weights)

    def apply(self, x: torch.Tensor, ctx: LinearContext) -> torch.Tensor:
        """Multiply, in float32 if the form asks for rounded activations."""
        num_outputs, num_inputs = self._shape
        product = x.new_empty(len(x), num_outputs)
        if self._form.activations is not None:
            x = fake_quantized(x, self._form.activations)
        for start, stop in row_slices(num_outputs, num_inputs * (5 + x.itemsize), x.device):
            product[:, start:stop] = padded_linear(x, self._expand(start, stop).to(x.dtype))
        return product if self._bias is None else product.add_(self._bias)

    def _expand(self, start: int, stop: int) -> torch.Tensor:
        """Return some weights in float32."""
        numbers = self._numbers(self._codes[start:stop])
        weights = numbers.view(stop - start, self._num_groups, -1)
        if self._zeros is not None:
            weights = weights.sub_(self._zeros[start:stop, :, None])
        weights = weights.mul_(self._scales[start:stop, :, None])
        if self._offsets is not None:
            weights = weights.sub_(self._offsets[start:stop, :, None])
        weights = weights.view(stop - start, -1)
        return weights if self._places is None else weights[:, self._places]

    def _numbers(self, codes: torch.Tensor) -> torch.Tensor:
        code = self._form.code
        if code in _FLOATS:
            return codes.view(_FLOATS[code]).float()
        if code.bits == 8:
            return codes.view(torch.int8).float()
        both = torch.stack((codes & 15, codes >> 4), dim=-1).view(len(codes), -1)
        if code is CodeType.FP4_E2M1:
            return self._table[both.int()]
        return both.float().sub_(8) if code is CodeType.INT4 else both.float()

    def _zeroed(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def _finish(self) -> None:
        stored = (self._codes, self._scales, self._zeros, self._offsets)
        self._weigh(math.prod(self._shape), sum(each.nbytes for each in stored if each is not None))


def _copy(target: torch.Tensor, source: npt.NDArray[np.generic]) -> None:
    # Views of a file may be read-only, which torch.from_numpy warns of; a piece is small.
    target.copy_(torch.from_numpy(np.array(source)))
