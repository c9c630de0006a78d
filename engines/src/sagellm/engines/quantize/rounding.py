"""Rows of a weight to the tensors that compressed-tensors stores of them."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sagellm.accel.int4 import Int4Quantizer
from sagellm.accel.int8 import Int8Quantizer, round_up
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
    return Int4Quantizer(config, search_scales=saved.search_scales)


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
            None,
            max(part.max_error_steps for part in parts),
        )
    quantizer = quantizer_of(saved)
    output = quantizer.quantize(rows)
    return RoundedRows(output.values, output.scales, None, quantizer.metrics().max_error_steps)


def _searched(rows: torch.Tensor, saved: SavedFormat, products: torch.Tensor) -> RoundedRows:
    quantizer = quantizer_of(saved)
    assert isinstance(quantizer, Int4Quantizer | Int8Quantizer)
    widest = quantizer_of(replace(saved, search_scales=False)).quantize(rows).scales  # checks the values, too
    groups = rows.view(*widest.shape, -1).transpose(0, 1)  # (groups, rows, group_size)
    best, least = widest, torch.full_like(widest, torch.inf)
    for shrink in _SHRINKS:
        scales = round_up(widest * shrink)
        steps = scales.T.unsqueeze(-1)
        codes = (groups / steps).round_().clamp_(quantizer.lowest, quantizer.highest)
        error = codes.mul_(steps).sub_(groups)
        squared = torch.bmm(error, products).mul_(error).sum(-1).T  # (rows, groups)
        best = torch.where(squared < least, scales, best)
        least = torch.minimum(squared, least)
    quotients = rows.view(*best.shape, -1) / best.unsqueeze(-1)
    codes = quotients.round().clamp_(quantizer.lowest, quantizer.highest)
    max_error = float(quotients.sub_(codes).abs_().max())
    return RoundedRows(codes.to(torch.int8).view(rows.shape), best, None, max_error)


def packed_rows(codes: torch.Tensor, bits: int) -> Bytes:
    """Return the bytes of int32 words (rows, words · 4) that hold integers (rows, in) of 4 or 8 bits.

    Stored is the number plus half of the range, the first in the low bits; rows are filled up with zeros.
    """
    unsigned = (codes.numpy().view(np.uint8) + np.uint8(1 << (bits - 1))) & np.uint8((1 << bits) - 1)
    per_word = 32 // bits
    padded = np.zeros((len(unsigned), -(-unsigned.shape[1] // per_word) * per_word), np.uint8)
    padded[:, : unsigned.shape[1]] = unsigned
    return padded if bits == 8 else padded[:, ::2] | padded[:, 1::2] << 4
