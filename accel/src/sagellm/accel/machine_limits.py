"""What this machine's cores can do at most, measured by the native library's loops."""

from __future__ import annotations

from typing import Literal

from sagellm.accel.native.library import NativeLibrary, best_or_named
from sagellm.core import UnsupportedModelError

NumberKind = Literal["bfloat16", "int8", "float32"]
_KINDS: dict[NumberKind, int] = {"bfloat16": 0, "int8": 1, "float32": 2}
_RATE_S = 0.5


class NativeLimits:
    """Calls the loops of one variant of the library; each call keeps `num_threads` cores busy."""

    def __init__(self, library: NativeLibrary) -> None:
        self.variant = library.variant
        self._functions = library.functions

    def read_bandwidth(self, num_bytes: int, num_threads: int) -> float | None:
        """Return bytes per second, the best of five; None if so much memory cannot be had."""
        return _measured(self._functions.sage_read_bandwidth(num_bytes, num_threads, 0.0))

    def matrix_rate(self, kind: NumberKind, num_threads: int) -> float | None:
        """Return operations per second of the widest instruction, the best of five; None if it is refused.

        A multiply-add is two. The loop multiplies what tiles or registers hold, so it is the peak that no
        product reaches.
        """
        return _measured(self._functions.sage_matrix_rate(_KINDS[kind], num_threads, _RATE_S))


def _measured(value: float) -> float | None:
    return value if value > 0 else None


def native_limits() -> NativeLimits | None:
    """Return the loops of the fastest variant, or None where the library does not run."""
    try:
        return NativeLimits(best_or_named())
    except UnsupportedModelError:
        return None
