"""Compiles the native library, once for each kind of x86-64 CPU that it has kernels for.

`python accel/native/build.py` rebuilds what is older than its sources, in the source tree. `--into DIR`
builds there instead, with `--sanitize address,undefined` or `--sanitize thread` with these checks; backends
load it from there if SAGELLM_NATIVE_FOLDER names the folder.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
TARGET = SOURCES.parent / "src" / "sagellm" / "accel" / "native"

_AVX2 = ["avx2", "fma", "f16c"]
_AVX512 = [*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni", "avx512bf16"]
FLAGS = {"avx2": _AVX2, "avx512": _AVX512, "amx": [*_AVX512, "amx-tile", "amx-bf16", "amx-int8"]}
"""The instruction sets that each variant may use, as compilers name them."""

SANITIZERS = ("address,undefined", "thread")
"""Checks that a library can be built with; the process must have loaded their runtime before it."""

_OPTIONS = ["-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread"]
_PORTABLE = [
    "-static-libstdc++",
    "-static-libgcc",
    "-s",
]  # so that one file runs with every compiler's runtime
_CHECKED = ["-O1", "-g1", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all"]
# g++ 12's own AVX-512 headers draw both "uninitialized" warnings.
_STRICT = ["-Wall", "-Wextra", "-Werror", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]


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
    """Return what is compiled; `*_c.cpp` are interfaces to single kernels, for tests and benchmarks."""
    return sorted(SOURCES.glob("*.cpp"))


def is_stale(library: Path) -> bool:
    """Whether a library is missing, or older than one of its sources."""
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


def build(
    target: Path = TARGET, *, variants: Iterable[str] = FLAGS, sanitizer: str | None = None
) -> list[Path]:
    """Compile the variants that are stale; return all libraries of them there are afterwards.

    A variant that the compiler cannot build is left out. Without a compiler, nothing is built. A folder keeps
    libraries of one sanitizer, or of none.
    """
    cxx, libraries = compiler(), {target / library_name(name): name for name in variants}
    stale = {library: name for library, name in libraries.items() if is_stale(library)}
    if cxx is not None and stale:
        target.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(lambda each: _compile(cxx, stale[each], each, sanitizer), stale))
    return [library for library in libraries if not is_stale(library)]


def _compile(cxx: str, variant: str, library: Path, sanitizer: str | None) -> None:
    unfinished = library.with_suffix(f".{os.getpid()}")
    how = ["-O3", *_PORTABLE] if sanitizer is None else [f"-fsanitize={sanitizer}", *_CHECKED, *_STRICT]
    flags = [f"-m{flag}" for flag in FLAGS[variant]]
    command = [cxx, *_OPTIONS, *how, *flags, *map(str, sources()), "-o", str(unfinished)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            sys.stderr.write(f"{cxx} cannot compile the variant {variant}:\n{result.stderr[-2000:]}\n")
            library.unlink(missing_ok=True)  # never an old one beside newer sources
        else:
            unfinished.replace(library)  # processes that have mapped the old file keep it
    finally:
        unfinished.unlink(missing_ok=True)


def main() -> str | None:
    """Build what the command line asks for; return what was wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--into", type=Path, default=TARGET, metavar="DIR")
    parser.add_argument("--sanitize", choices=SANITIZERS)
    options = parser.parse_args()
    if options.sanitize and options.into == TARGET:
        parser.error("--sanitize needs --into: such a library is not for the package")
    if compiler() is None:
        return "there is no C++ compiler for x86-64 Linux here"
    built = build(options.into, sanitizer=options.sanitize)
    sys.stdout.writelines(f"{library}\n" for library in built)
    return None if built else "the compiler could build no variant"


if __name__ == "__main__":
    sys.exit(main())
