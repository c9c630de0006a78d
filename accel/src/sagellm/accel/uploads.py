"""Copies arrays to a device without waiting for what runs there, several in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

_ALIGNED_BYTES = 16
"""Each array begins at a multiple of this: kernels are compiled once for such addresses, once for others."""

Item = TypeVar("Item", bound=np.generic)


def pack(arrays: Sequence[npt.NDArray[Item]]) -> npt.NDArray[Item]:
    """Put flat arrays of one type behind one another."""
    begins = _begins([len(each) for each in arrays], arrays[0].itemsize)
    packed = np.zeros(begins[-1], arrays[0].dtype)
    for begin, array in zip(begins, arrays, strict=False):
        packed[begin : begin + len(array)] = array
    return packed


def unpack(packed: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
    """Return the packed arrays of these lengths as views."""
    begins = _begins(lengths, packed.itemsize)
    return [packed.narrow(0, begin, length) for begin, length in zip(begins, lengths, strict=False)]


def packed_length(lengths: Sequence[int], item_bytes: int) -> int:
    """Return how many items arrays of these lengths take when packed."""
    return _begins(lengths, item_bytes)[-1]


def _begins(lengths: Sequence[int], item_bytes: int) -> list[int]:
    """Return where each array begins, and where the last one's place ends."""
    step = max(1, _ALIGNED_BYTES // item_bytes)
    return list(accumulate((-(-length // step) * step for length in lengths), initial=0))


def on_host(values: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Return an array as a tensor from which a copy to the device waits for nothing."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def send(values: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Copy an array to a device without waiting for what runs there."""
    return on_host(values, device).to(device, non_blocking=True)


def upload(arrays: Sequence[npt.NDArray[Item]], device: torch.device) -> list[torch.Tensor]:
    """Copy flat arrays of one type to a device in one copy."""
    return unpack(send(pack(arrays), device), [len(each) for each in arrays])
