"""Mends Triton's interpreter, which runs kernels without a GPU for tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl
from triton.runtime import interpreter


def mend_rounding() -> None:
    """Have it round float32 to FP8 (E4M3) correctly: it drops the carry of what rounds up to a power of 2."""
    convert = interpreter._convert_float

    def converted(values: npt.NDArray[Any], source: Any, target: Any, mode: Any) -> npt.NDArray[Any]:
        if (source, target) != (tl.float32, tl.float8e4nv):
            result: npt.NDArray[Any] = convert(values, source, target, mode)
            return result
        rounded = torch.from_numpy(np.ascontiguousarray(values)).to(torch.float8_e4m3fn)
        bits: npt.NDArray[np.uint8] = rounded.view(torch.uint8).numpy()
        return bits

    interpreter._convert_float = converted
