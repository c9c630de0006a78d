"""Finds the variant of the native library for this CPU, and loads it."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sagellm.accel.native import structures
from sagellm.core import UnsupportedModelError

VARIABLE = "SAGELLM_NATIVE_FOLDER"
"""Names a folder of libraries that are loaded instead of the package's: a build with a sanitizer, say."""


def library_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where the libraries are: the named folder, or the package's."""
    return Path(environ.get(VARIABLE) or Path(__file__).parent).resolve()


PACKAGED = library_folder({})
FOLDER = library_folder()

_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx512_bf16")
VARIANTS: Mapping[str, tuple[str, ...]] = {
    "amx": (*_AVX512, "amx_tile", "amx_bf16", "amx_int8"),
    "avx512": _AVX512,
    "avx2": _AVX2,
}
"""The CPU flags that each variant needs, the fastest variant first."""

_POINTER, _INT32, _INT64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_FUNCTIONS: Mapping[str, tuple[object, tuple[object, ...]]] = {
    "sage_variant": (ctypes.c_char_p, ()),
    "sage_prepare": (_INT32, ()),
    "sage_weight_bytes": (_INT64, (_POINTER,)),
    "sage_pack_granularity": (_INT64, ()),
    "sage_pack": (_INT32, (_POINTER, _INT64, _INT64, _INT32, _POINTER, _INT32)),
    "sage_pack_quantized": (
        _INT32,
        (_POINTER, _INT64, _INT64, _INT32, _POINTER, ctypes.c_float, _POINTER, _INT32, _INT32),
    ),
    "sage_pack_codes": (None, (_POINTER, _INT64, _INT64, _POINTER, _INT32)),
    "sage_convert": (_INT32, (_INT32, _POINTER, _INT64, _INT32, _POINTER, _INT32)),
    "sage_create": (_POINTER, (_POINTER,)),
    "sage_destroy": (None, (_POINTER,)),
    "sage_set_kv": (None, (_POINTER, _POINTER)),
    "sage_beat_with": (None, (_POINTER, structures.Beat)),
    "sage_time_operations": (None, (_POINTER, _INT32)),
    "sage_laps": (_INT64, (_POINTER, _POINTER)),
    "sage_step": (_INT32, (_POINTER, _POINTER)),
    "sage_activation_bytes": (_INT64, (_POINTER,)),
    "sage_draw_scratch_bytes": (_INT64, (_INT64, _INT32)),
    "sage_draw": (None, (_POINTER,)),
    "sage_read_bandwidth": (ctypes.c_double, (_INT64, _INT32, ctypes.c_double)),
    "sage_matrix_rate": (ctypes.c_double, (_INT32, _INT32, ctypes.c_double)),
}


@dataclass(frozen=True)
class NativeLibrary:
    """One variant, loaded and ready."""

    variant: str
    functions: ctypes.CDLL

    @property
    def file(self) -> Path:
        """The file that it was loaded from."""
        return FOLDER / _file(self.variant)


@dataclass(frozen=True)
class Examination:
    """Which variant runs here, and why each other one does not."""

    variant: str | None
    refusals: Mapping[str, str]


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the CPU's flags by the kernel's names; none where it does not list them."""
    try:
        lines = cpuinfo.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), ()))


def refusal(variant: str, flags: frozenset[str], folder: Path = FOLDER) -> str | None:
    """Say why a variant cannot be loaded here; None if it can be tried."""
    if not (folder / _file(variant)).exists():
        if folder != PACKAGED:
            return f"{folder}, which {VARIABLE} names, has no {_file(variant)}"
        return "it was not built: installing sagellm-accel found no C++ compiler for x86-64 Linux"
    if missing := [flag for flag in VARIANTS[variant] if flag not in flags]:
        return f"this CPU lacks {', '.join(missing)}"
    return None


@cache
def examine() -> Examination:
    """Try the variants, the fastest first."""
    refusals = {}
    for variant in VARIANTS:
        try:
            load(variant)
        except UnsupportedModelError as error:
            refusals[variant] = str(error)
        else:
            return Examination(variant, refusals)
    return Examination(None, refusals)


def best_or_named(variant: str | None = None) -> NativeLibrary:
    """Load the fastest variant, or the named one. Raises UnsupportedModelError with the reasons."""
    if variant is not None:
        return load(variant)
    found = examine()
    if found.variant is None:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in found.refusals.items())
        raise UnsupportedModelError(f"no variant of the native library runs here ({reasons})")
    return load(found.variant)


_loading = threading.Lock()


def load(variant: str) -> NativeLibrary:
    """Load a variant, once per process. Raises UnsupportedModelError if it does not run here."""
    if variant not in VARIANTS:
        raise UnsupportedModelError(
            f"the native library has no variant {variant!r}; there are {', '.join(VARIANTS)}"
        )
    with _loading:
        return _load(variant)


@cache
def _load(variant: str) -> NativeLibrary:
    if (reason := refusal(variant, cpu_flags())) is not None:
        raise UnsupportedModelError(reason)
    try:
        functions = ctypes.CDLL(str(FOLDER / _file(variant)))
    except OSError as error:
        raise UnsupportedModelError(f"it cannot be loaded: {error}") from error
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(functions, name)
        function.restype, function.argtypes = result, arguments
    if status := functions.sage_prepare():
        raise UnsupportedModelError(f"the kernel refuses its registers: {os.strerror(status)}")
    return NativeLibrary(variant, functions)


def _file(variant: str) -> str:
    return f"libsage_{variant}.so"
