"""The library's loops that measure the machine, for each variant that this CPU can run."""

from __future__ import annotations

import pytest

from sagellm.accel import machine_limits
from sagellm.accel.machine_limits import NativeLimits, native_limits
from sagellm.accel.native import library
from sagellm.core import UnsupportedModelError


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(machine_limits, "_RATE_S", 0.01)


def limits_of(variant: str) -> NativeLimits:
    try:
        return NativeLimits(library.load(variant))
    except UnsupportedModelError as error:
        pytest.skip(str(error))


@pytest.mark.full
@pytest.mark.parametrize("variant", library.VARIANTS)
def test_every_variant_measures_plausible_rates(variant):
    limits = limits_of(variant)
    assert 1e8 < limits.read_bandwidth(1 << 24, 2) < 1e13
    # In turns, the best of each: another process may take the core during any of them.
    turns = [[limits.matrix_rate(kind, 1) for kind in ("float32", "bfloat16", "int8")] for _ in range(5)]
    float32, bfloat16, int8 = (max(rates) for rates in zip(*turns, strict=True))
    assert 1e9 < bfloat16 < 1e14
    assert int8 > 1.2 * bfloat16
    assert 1e9 < float32 < 2.6 * bfloat16  # twice as fast with AVX-512 on a CPU with AMX


def test_what_makes_no_sense_is_not_measured():
    limits = limits_of("avx2")
    assert limits.read_bandwidth(1 << 20, 1) is None  # less than one piece
    assert limits.read_bandwidth(1 << 24, 0) is None
    assert limits.matrix_rate("bfloat16", 0) is None


def test_without_a_library_there_are_no_loops(monkeypatch):
    def refuse(variant=None):
        raise UnsupportedModelError("it was not built")

    monkeypatch.setattr(machine_limits, "best_or_named", refuse)
    assert native_limits() is None
