"""Factors on the inputs of linears, undone in the norm or linear before them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Factors:
    """What the outputs (out,) and inputs (in,) of a tensor are multiplied by; a vector has outputs alone."""

    outputs: torch.Tensor | None = None
    inputs: torch.Tensor | None = None
