"""What this machine's cores can do at most, measured by the native library's loops."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Literal

_FOLDER = Path(__file__).parent / "native"
_CPU_INFO = Path("/proc/cpuinfo")

# The variant of the library → the CPU flags that it needs, the best first.
_VARIANTS: dict[str, frozenset[str]] = {
    "amx": frozenset({"amx_tile", "amx_bf16", "amx_int8", "avx512_bf16"}),
    "avx512": frozenset({"avx512_bf16", "avx512_vnni", "avx512bw", "avx512dq", "avx512vl"}),
    "avx2": frozenset({"avx2", "fma", "f16c"}),
}

NumberKind = Literal["bfloat16", "int8"]
_KINDS: dict[NumberKind, int] = {"bfloat16": 0, "int8": 1}
_RATE_S = 0.5


class NativeLimits:
    """Calls the loops of one build of the library; each call keeps `num_threads` cores busy."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self.variant = path.stem.removeprefix("libsage_")
        self._read, self._multiply = library.sage_read_bandwidth, library.sage_matrix_rate
        self._read.argtypes = (ctypes.c_int64, ctypes.c_int32, ctypes.c_double)
        self._multiply.argtypes = (ctypes.c_int32, ctypes.c_int32, ctypes.c_double)
        self._read.restype = self._multiply.restype = ctypes.c_double

    def read_bandwidth(self, num_bytes: int, num_threads: int) -> float | None:
        """Return bytes per second, the best of five; None if so much memory cannot be had."""
        return _measured(self._read(num_bytes, num_threads, 0.0))

    def matrix_rate(self, kind: NumberKind, num_threads: int) -> float | None:
        """Return operations per second of the widest instruction, the best of five; None if it is refused.

        A multiply-add is two. The loop multiplies what tiles or registers hold, so it is the peak that no
        product reaches.
        """
        return _measured(self._multiply(_KINDS[kind], num_threads, _RATE_S))


def _measured(value: float) -> float | None:
    return value if value > 0 else None


@cache
def native_limits(folder: Path = _FOLDER) -> NativeLimits | None:
    """Load the library for this CPU, or return None where there is none."""
    flags = _cpu_flags()
    for variant, needed in _VARIANTS.items():
        path = folder / f"libsage_{variant}.so"
        if needed <= flags and path.exists():
            try:
                return NativeLimits(path)
            except (OSError, AttributeError):  # built for another system, or without these loops
                return None
    return None


def _cpu_flags() -> frozenset[str]:
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split() for line in lines if line.startswith("flags")), ()))
