"""Rows of a weight to the tensors that compressed-tensors stores of them."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sagellm.accel.fp8 import FP8Quantizer
from sagellm.accel.int4 import Int4Quantizer
from sagellm.accel.int8 import Int8Quantizer, IntegerQuantizer
from sagellm.accel.scaled_quantizer import round_up
from sagellm.accel.slices import row_slices
from sagellm.core import QuantizationConfig, QuantizationGranularity, QuantizerProtocol
from sagellm.core.protocols.weight_form import CodeType
from sagellm.engines.quantize.formats import SavedFormat

Bytes = npt.NDArray[np.uint8]
_SHRINKS = tuple(1.1 - 0.025 * step for step in range(22))
"""Factors on the widest scale that are tried with products: 1.1 down to 0.575."""


class RoundedRows(NamedTuple):
    """Codes (rows, in), scales and zeros (rows, groups), and the largest error in steps."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    max_error_steps: float

    def expand(self) -> torch.Tensor:
        """Return the weights (rows, in) that they stand for, in float32."""
        numbers = self.codes.float().reshape(*self.scales.shape, -1)
        if self.zeros is not None:
            numbers = numbers - self.zeros.float().unsqueeze(-1)
        return (numbers * self.scales.unsqueeze(-1)).reshape(self.codes.shape)


def quantizer_of(saved: SavedFormat) -> QuantizerProtocol:
    """Return the quantizer that rounds as a format says."""
    config = QuantizationConfig(
        clip_ratio=saved.clip_ratio,
        group_size=saved.group_size or 1,
        granularity=QuantizationGranularity.PER_GROUP
        if saved.group_size
        else QuantizationGranularity.PER_CHANNEL,
    )
    if saved.code is CodeType.INT8:
        return Int8Quantizer(config)
    if saved.code is CodeType.FP8_E4M3:
        return FP8Quantizer(config)
    return Int4Quantizer(config, search_scales=saved.search_scales, asymmetric=saved.asymmetric)


def round_rows(rows: torch.Tensor, saved: SavedFormat, products: torch.Tensor | None = None) -> RoundedRows:
    """Round some rows (rows, in) of a weight. Raises InvalidInputError for values that are not finite.

    `products` (groups, group_size, group_size) are the sums of x·xᵀ over tokens: scales are then those with
    the least squared error of each group's part of the outputs, instead of the weights'.
    """
    if products is not None:
        slices = row_slices(len(rows), rows.shape[1] * 16, rows.device)
        parts = [_searched(rows[start:stop].float(), saved, products) for start, stop in slices]
        return RoundedRows(
            torch.cat([part.codes for part in parts]),
            torch.cat([part.scales for part in parts]),
            torch.cat([part.zeros for part in parts if part.zeros is not None]) if saved.asymmetric else None,
            max(part.max_error_steps for part in parts),
        )
    quantizer = quantizer_of(saved)
    output = quantizer.quantize(rows)
    return RoundedRows(output.values, output.scales, output.zeros, quantizer.metrics().max_error_steps)


def _searched(rows: torch.Tensor, saved: SavedFormat, products: torch.Tensor) -> RoundedRows:
    quantizer = quantizer_of(replace(saved, search_scales=False))
    assert isinstance(quantizer, IntegerQuantizer), "formats with groups are integers"
    widest = quantizer.quantize(rows)  # checks the values, too
    zeros = torch.zeros_like(widest.scales) if widest.zeros is None else widest.zeros.float()
    low, high = ((end - zeros).unsqueeze(-1) for end in (quantizer.lowest, quantizer.highest))
    grouped = rows.view(*zeros.shape, -1)  # (rows, groups, group_size)
    best, least = widest.scales, torch.full_like(widest.scales, torch.inf)
    for shrink in _SHRINKS:
        scales = round_up(widest.scales * shrink)
        steps = scales.unsqueeze(-1)
        numbers = (grouped / steps).round_().clamp_(low, high)
        error = numbers.mul_(steps).sub_(grouped).transpose(0, 1)  # (groups, rows, group_size)
        squared = torch.bmm(error, products).mul_(error).sum(-1).T  # (rows, groups)
        best = torch.where(squared < least, scales, best)
        least = torch.minimum(squared, least)
    quotients = grouped / best.unsqueeze(-1)
    numbers = quotients.round().clamp_(low, high)
    max_error = float(quotients.sub_(numbers).abs_().max())
    codes = numbers.add_(zeros.unsqueeze(-1)).to(torch.int8).view(rows.shape)
    return RoundedRows(codes, best, widest.zeros, max_error)


def packed_rows(codes: torch.Tensor, bits: int) -> Bytes:
    """Return the bytes of int32 words (rows, words · 4) that hold integers (rows, in) of 4 or 8 bits.

    Stored is the number plus half of the range, the first in the low bits; rows are filled up with zeros.
    """
    unsigned = (codes.numpy().view(np.uint8) + np.uint8(1 << (bits - 1))) & np.uint8((1 << bits) - 1)
    per_word = 32 // bits
    padded = np.zeros((len(unsigned), -(-unsigned.shape[1] // per_word) * per_word), np.uint8)
    padded[:, : unsigned.shape[1]] = unsigned
    return padded if bits == 8 else padded[:, ::2] | padded[:, 1::2] << 4
