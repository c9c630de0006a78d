"""Rows of a weight to the tensors that compressed-tensors stores of them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sagellm.accel.int4 import Int4Quantizer
from sagellm.accel.int8 import Int8Quantizer
from sagellm.core import QuantizationConfig, QuantizationGranularity, QuantizerProtocol
from sagellm.core.protocols.weight_form import CodeType
from sagellm.engines.quantize.formats import SavedFormat

Bytes = npt.NDArray[np.uint8]


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


def round_rows(rows: torch.Tensor, saved: SavedFormat) -> RoundedRows:
    """Round some rows (rows, in) of a weight. Raises InvalidInputError for values that are not finite."""
    quantizer = quantizer_of(saved)
    output = quantizer.quantize(rows)
    return RoundedRows(output.values, output.scales, None, quantizer.metrics().max_error_steps)


def packed_rows(codes: torch.Tensor, bits: int) -> Bytes:
    """Return the bytes of int32 words (rows, words · 4) that hold integers (rows, in) of 4 or 8 bits.

    Stored is the number plus half of the range, the first in the low bits; rows are filled up with zeros.
    """
    unsigned = (codes.numpy().view(np.uint8) + np.uint8(1 << (bits - 1))) & np.uint8((1 << bits) - 1)
    per_word = 32 // bits
    padded = np.zeros((len(unsigned), -(-unsigned.shape[1] // per_word) * per_word), np.uint8)
    padded[:, : unsigned.shape[1]] = unsigned
    return padded if bits == 8 else padded[:, ::2] | padded[:, 1::2] << 4
