"""How kernels are declared, and where they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from sagellm.accel.cuda.support import IS_INTERPRETED

if IS_INTERPRETED:
    from sagellm.accel.cuda.interpreter import mend_rounding

    mend_rounding()

_TRITON = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


_VARYING = ("num_edits", "num_tiles", "num_tokens", "num_top", "table_stride")
"""Arguments that differ from step to step, for some values of which Triton would compile a kernel anew."""


def kernel(function: Callable[..., Any]) -> Any:
    """Declare a kernel: `declared[grid](...)` launches it.

    Its arguments are annotated as inside: tensors there are pointers or numbers here.
    """
    return triton.jit(function, do_not_specialize=_VARYING)


def device_function(function: Callable[..., Any]) -> Any:
    """Declare a function that kernels call."""
    return triton.jit(function)


def compute_type(dtype: torch.dtype) -> Any:
    """Return the type in which matrices are multiplied; the interpreter's products in bf16 are wrong."""
    return tl.float32 if IS_INTERPRETED else _TRITON[dtype]


def next_power_of_2(number: int) -> int:
    """Round up: the sizes of a kernel's vectors are powers of two."""
    return 1 << max(0, number - 1).bit_length()
