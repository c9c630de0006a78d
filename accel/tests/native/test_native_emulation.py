"""The tests of the AMX kernels where there is no AMX: tiles are memory, everything else is AVX-512."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
from native_build import load_build

from sagellm.accel.native.library import VARIABLE, VARIANTS, cpu_flags

FOLDER = Path(__file__).parent
TESTS = (
    "test_native_attention.py",
    "test_native_linear.py",
    "test_native_codes.py",
    "test_native_backend.py",
)


@pytest.mark.full
def test_the_kernels_for_tiles_pass_their_tests_with_emulated_tiles(tmp_path):
    build, flags = load_build(), cpu_flags()
    if build.compiler() is None or not flags.issuperset(VARIANTS["avx512"]):
        pytest.skip("needs a C++ compiler, and AVX-512 with BF16 and VNNI")
    if flags.issuperset(VARIANTS["amx"]):
        pytest.skip("this CPU has the tiles")
    # The file is named after what the CPU has, so that it is loaded.
    library = tmp_path / build.library_name("avx512")
    options = ["-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread", "-O2"]
    instructions = [f"-m{flag}" for flag in build.FLAGS["avx512"]]
    emulation = ["-include", str(FOLDER / "emulated_tiles.h")]
    command = [
        build.compiler(),
        *options,
        *instructions,
        *emulation,
        *map(str, build.sources()),
        "-o",
        library,
    ]
    compiled = subprocess.run(command, capture_output=True, text=True, check=False)
    assert compiled.returncode == 0, compiled.stderr[-3000:]
    name = ctypes.CDLL(str(library)).sage_variant
    name.restype = ctypes.c_char_p
    assert name() == b"amx"
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))}
    pytest_ = [sys.executable, "-m", "pytest", "-x", "--import-mode=importlib", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*pytest_, "-m", "not full", *(str(FOLDER / name) for name in TESTS)],
        env={**environ, VARIABLE: str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-6000:]
