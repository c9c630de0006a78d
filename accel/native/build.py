"""Compiles the native library, once for each kind of x86-64 CPU that it has kernels for.

`python accel/native/build.py` rebuilds what is older than its sources, in the source tree.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
TARGET = SOURCES.parent / "src" / "sagellm" / "accel" / "native"

_AVX2 = ["avx2", "fma", "f16c"]
_AVX512 = [*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni", "avx512bf16"]
FLAGS = {"avx2": _AVX2, "avx512": _AVX512, "amx": [*_AVX512, "amx-tile", "amx-bf16", "amx-int8"]}
"""The instruction sets that each variant may use, as compilers name them."""

_OPTIONS = ["-std=c++17", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread"]
_PORTABLE = [
    "-static-libstdc++",
    "-static-libgcc",
    "-s",
]  # so that one file runs with every compiler's runtime


def library_name(variant: str) -> str:
    """Return the file of a variant."""
    return f"libsage_{variant}.so"


def compiler() -> str | None:
    """Return the C++ compiler: `CXX`, g++ or clang++; None on other machines than x86-64 Linux."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return None
    named = os.environ.get("CXX")
    return shutil.which(named) if named else shutil.which("g++") or shutil.which("clang++")


def sources() -> list[Path]:
    """Return what is compiled; `*_c.cpp` are interfaces for the tests of single kernels."""
    return sorted(path for path in SOURCES.glob("*.cpp") if not path.stem.endswith("_c"))


def is_stale(library: Path) -> bool:
    """Say whether a source is newer than a library, or there is no library."""
    if not library.exists():
        return True
    newest = max(path.stat().st_mtime for path in (*SOURCES.glob("*.h"), *sources(), Path(__file__)))
    return newest > library.stat().st_mtime


@contextmanager
def one_at_a_time(target: Path = TARGET) -> Iterator[None]:
    """Hold a lock inside the block, so that processes that share a source tree compile once."""
    with open(target / "__init__.py", "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build(target: Path = TARGET) -> list[Path]:
    """Compile the variants that are stale; return all libraries there are afterwards.

    A variant that the compiler cannot build is left out. Without a compiler, nothing is built.
    """
    cxx = compiler()
    stale = [name for name in FLAGS if is_stale(target / library_name(name))]
    if cxx is not None and stale:
        target.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(lambda name: _compile(cxx, name, target / library_name(name)), stale))
    libraries = [target / library_name(name) for name in FLAGS]
    return [library for library in libraries if not is_stale(library)]


def _compile(cxx: str, variant: str, library: Path) -> None:
    unfinished = library.with_suffix(f".{os.getpid()}")
    flags = [f"-m{flag}" for flag in FLAGS[variant]]
    command = [cxx, *_OPTIONS, *flags, *map(str, sources()), *_PORTABLE, "-o", str(unfinished)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            sys.stderr.write(f"{cxx} cannot compile the variant {variant}:\n{result.stderr[-2000:]}\n")
            library.unlink(missing_ok=True)  # never an old one beside newer sources
        else:
            unfinished.replace(library)  # whoever has the old file mapped keeps it
    finally:
        unfinished.unlink(missing_ok=True)


if __name__ == "__main__":
    for built in build():
        sys.stdout.write(f"{built}\n")
    sys.exit(None if compiler() else "there is no C++ compiler for x86-64 Linux here")
