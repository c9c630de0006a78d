"""Tokens chosen by a kernel: one call for all rows, each with its settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from sagellm.core import UnsupportedModelError
from sagellm.engines.sampling.filters import dropped_share
from sagellm.engines.sampling.params import SamplingParams

Draw = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Returns tokens (rows,) int64, -1 for rows that are not distributions, of logits (rows, vocab) and settings.

Settings are (rows, 5) float64: temperature, min-p, top-k, 1 - top-p, and a uniform number; 0, 0, 0 and a
negative number switch them off."""


@runtime_checkable
class HostDraw(Protocol):
    """A `Draw` on the host, which takes arrays and makes the random numbers too."""

    def choose(
        self,
        logits: torch.Tensor,
        settings: npt.NDArray[np.float64],
        keys: npt.NDArray[np.uint64],
        positions: npt.NDArray[np.uint64],
    ) -> npt.NDArray[np.int64]:
        """Return what a `Draw` returns, with the numbers of `random.numbers_of` as the last setting."""


Filters = tuple[float, float, int, float]
"""A row's settings, but the number."""


def device_draw(device: torch.device) -> Draw | None:
    """Return the kernel that draws on a device; None: the sampler draws with torch alone."""
    if device.type == "cuda":
        try:
            from sagellm.accel.cuda.sampling import draw_tokens
        except ImportError:  # without triton
            return None
        on_gpu: Draw = draw_tokens
        return on_gpu
    return _native_draw() if device.type == "cpu" else None


def _native_draw() -> Draw | None:
    from sagellm.accel.native import NativeDraw

    try:
        return NativeDraw()
    except UnsupportedModelError:  # not built, or for another CPU
        return None


def filters_of(params: SamplingParams) -> Filters:
    """Return a row's settings, without its number."""
    temperature = 0.0 if params.is_greedy else params.temperature
    return temperature, params.min_p, params.top_k, dropped_share(params.top_p)


def neighbours(rows: Sequence[int]) -> Iterator[list[int]]:
    """Cut rising numbers where one is missing."""
    begin = 0
    for end in range(1, len(rows) + 1):
        if end == len(rows) or rows[end] != rows[end - 1] + 1:
            yield list(rows[begin:end])
            begin = end
