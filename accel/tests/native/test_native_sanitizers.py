"""The tests of the native library once more, with builds that report bad accesses and races."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from native_build import load_build

from sagellm.accel.native.library import VARIABLE, VARIANTS, cpu_flags

FOLDER = Path(__file__).parent
RUNTIMES = {"address,undefined": "libasan.so", "thread": "libtsan.so"}
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0",  # Python leaves memory to the system at its end
    "UBSAN_OPTIONS": "print_stacktrace=1",
    # How threads of numpy and torch wait for each other, the sanitizer does not see: it looks at ours only.
    "TSAN_OPTIONS": "halt_on_error=1:ignore_noninstrumented_modules=1",
}


def runtime(cxx: str, sanitizer: str) -> str:
    """The file that a process must load before anything else."""
    name = RUNTIMES[sanitizer]
    found = subprocess.run([cxx, f"-print-file-name={name}"], capture_output=True, text=True, check=False)
    path = found.stdout.strip()
    if not Path(path).is_absolute():  # the compiler repeats a name that it does not find
        pytest.skip(f"{cxx} has no {name}")
    return path


@pytest.mark.full
@pytest.mark.parametrize("sanitizer", RUNTIMES)
def test_the_tests_of_the_library_pass_with_a_sanitizer(tmp_path, sanitizer):
    build = load_build()
    cxx = build.compiler()
    if cxx is None:
        pytest.skip("no C++ compiler for x86-64 Linux")
    preloaded = runtime(cxx, sanitizer)
    runnable = [variant for variant, needed in VARIANTS.items() if cpu_flags().issuperset(needed)]
    if sanitizer == "thread":
        runnable = runnable[:1]  # all variants share work out alike
    libraries = build.build(tmp_path, variants=runnable, sanitizer=sanitizer)
    assert len(libraries) == len(runnable), "the compiler says on standard error what it cannot compile"
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))},
        **OPTIONS,
        VARIABLE: str(tmp_path),
        "LD_PRELOAD": preloaded,
        "OMP_NUM_THREADS": "3",  # so that steps run on a team
    }
    # A compiler does not run well with a sanitizer loaded; the pool's own program has a test with both.
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-s",
        "--import-mode=importlib",
        "-p",
        "no:cacheprovider",
    ]
    command += ["-m", "not full", str(FOLDER), f"--ignore={FOLDER / 'test_native_team.py'}"]
    result = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=400)
    assert result.returncode == 0, (result.stdout + result.stderr)[-6000:]
