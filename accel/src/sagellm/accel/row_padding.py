"""Pads products to few different sizes, so that oneDNN compiles few kernels."""

from __future__ import annotations

import torch
from torch.nn import functional

_TILE_ROWS = 16
"""Rows that AMX multiplies at once. Batches this small are decoding sequences, and are not padded."""


def num_padded(num_rows: int) -> int:
    """Return the number of rows that `pad_rows` returns for this many."""
    if num_rows <= _TILE_ROWS:
        return num_rows
    multiple = max(_TILE_ROWS, 1 << num_rows.bit_length() - 4)
    return -(-num_rows // multiple) * multiple


def pad_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x (tokens, in) padded with zero rows: to a multiple of 16, or of 1/8 of its size.

    For operands of oneDNN, which compiles a kernel for each number of rows. That takes some milliseconds
    and about 0.6 MiB, and up to 1,024 kernels are kept: without padding, prompts of many lengths cost a
    gigabyte. Padding adds at most an eighth to a product of 128 or more rows, 4 % on average.
    """
    num_missing = num_padded(len(x)) - len(x)
    return functional.pad(x, (0, 0, 0, num_missing)) if num_missing else x


def padded_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x @ weight.T + bias; 16-bit rows on a CPU are padded as by `pad_rows`.

    In float32 torch calls a library that compiles nothing.
    """
    if x.device.type != "cpu" or x.dtype == torch.float32:
        return functional.linear(x, weight, bias)
    return functional.linear(pad_rows(x), weight, bias)[: len(x)]
