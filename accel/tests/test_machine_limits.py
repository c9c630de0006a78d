"""The library's loops that measure the machine, built here for each CPU that this one can run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from sagellm.accel import machine_limits
from sagellm.accel.machine_limits import NativeLimits, native_limits

SOURCE = Path(__file__).parents[1] / "native" / "limits.cpp"
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mavx512vnni")
FLAGS = {
    "amx": (*AVX512, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    "avx512": AVX512,
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
}


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """Compile the loops for one kind of CPU."""
    if shutil.which("g++") is None:
        pytest.skip("no compiler")
    folder = tmp_path_factory.mktemp("native")

    def compile_for(variant: str) -> Path:
        if not machine_limits._VARIANTS[variant] <= machine_limits._cpu_flags():
            pytest.skip(f"this CPU cannot run the build for {variant}")
        path = folder / f"libsage_{variant}.so"
        options = ("-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-pthread")
        subprocess.run(["g++", *options, *FLAGS[variant], str(SOURCE), "-o", str(path)], check=True)
        return path

    return compile_for


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(machine_limits, "_RATE_S", 0.01)
    native_limits.cache_clear()


@pytest.mark.full
@pytest.mark.parametrize("variant", FLAGS)
def test_every_build_measures_plausible_rates(build, variant):
    limits = NativeLimits(build(variant))
    assert 1e8 < limits.read_bandwidth(1 << 24, 2) < 1e13
    assert 1e9 < limits.matrix_rate("bfloat16", 1) < 1e14
    assert limits.matrix_rate("int8", 1) > 1.2 * limits.matrix_rate("bfloat16", 1)


def test_what_makes_no_sense_is_not_measured(build):
    limits = NativeLimits(build("avx2"))
    assert limits.read_bandwidth(1 << 20, 1) is None  # less than one piece
    assert limits.read_bandwidth(1 << 24, 0) is None
    assert limits.matrix_rate("bfloat16", 0) is None


def test_the_widest_build_that_the_cpu_can_run_is_taken(tmp_path, monkeypatch):
    for variant in FLAGS:
        (tmp_path / f"libsage_{variant}.so").touch()
    monkeypatch.setattr(machine_limits, "NativeLimits", lambda path: path.name)
    monkeypatch.setattr(machine_limits, "_cpu_flags", lambda: frozenset({"avx2", "fma", "f16c"}))
    assert native_limits(tmp_path) == "libsage_avx2.so"
    native_limits.cache_clear()
    every = frozenset().union(*machine_limits._VARIANTS.values())
    monkeypatch.setattr(machine_limits, "_cpu_flags", lambda: every)
    assert native_limits(tmp_path) == "libsage_amx.so"


def test_a_library_that_cannot_be_loaded_counts_as_none(tmp_path):
    assert native_limits(tmp_path) is None
    for variant in FLAGS:
        (tmp_path / f"libsage_{variant}.so").write_text("no library")
    native_limits.cache_clear()
    assert native_limits(tmp_path) is None
