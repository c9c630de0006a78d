"""Which variant is taken, how it is built, and what is said where there is none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from native_build import load_build

from sagellm.accel.native import library
from sagellm.core import UnsupportedModelError

ZEN3 = frozenset({"avx2", "fma", "f16c", "sse4_2"})


@pytest.fixture
def built(tmp_path: Path) -> Path:
    for variant in library.VARIANTS:
        (tmp_path / f"libsage_{variant}.so").touch()
    return tmp_path


def test_variants_come_fastest_first():
    assert list(library.VARIANTS) == ["amx", "avx512", "avx2"]


def test_a_variant_needs_all_its_flags(built):
    assert library.refusal("avx2", ZEN3, built) is None
    assert library.refusal("avx512", ZEN3, built) == (
        "this CPU lacks avx512f, avx512bw, avx512vl, avx512dq, avx512_vnni, avx512_bf16"
    )
    zen4 = ZEN3 | set(library.VARIANTS["avx512"])
    assert library.refusal("avx512", zen4, built) is None
    assert library.refusal("amx", zen4, built) == "this CPU lacks amx_tile, amx_bf16, amx_int8"


def test_a_variant_that_was_not_built_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(library, "PACKAGED", tmp_path)
    assert "found no C++ compiler" in str(library.refusal("avx2", ZEN3, tmp_path))


def test_a_folder_of_other_libraries_can_be_named(tmp_path):
    assert library.library_folder({}) == Path(library.__file__).parent
    assert library.library_folder({"SAGELLM_NATIVE_FOLDER": str(tmp_path)}) == tmp_path.resolve()
    refusal = str(library.refusal("avx2", ZEN3, tmp_path))
    assert refusal == f"{tmp_path}, which SAGELLM_NATIVE_FOLDER names, has no libsage_avx2.so"


def test_flags_are_read_from_the_kernel(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu avx2 fma\nprocessor\t: 1\nflags\t\t: fpu\n")
    assert library.cpu_flags(cpuinfo) == {"fpu", "avx2", "fma"}
    assert library.cpu_flags(tmp_path / "missing") == frozenset()


def test_the_examination_names_a_reason_for_each_faster_variant():
    found = library.examine()
    faster = list(library.VARIANTS)
    if found.variant is not None:
        faster = faster[: faster.index(found.variant)]
        assert library.load(found.variant).functions.sage_variant().decode() == found.variant
    assert list(found.refusals) == faster
    assert all(found.refusals.values())


def test_without_any_variant_all_reasons_are_named(monkeypatch):
    found = library.Examination(None, {"amx": "this CPU lacks amx_tile", "avx2": "it was not built"})
    monkeypatch.setattr(library, "examine", lambda: found)
    with pytest.raises(UnsupportedModelError, match=r"amx: this CPU lacks amx_tile; avx2: it was not built"):
        library.best_or_named()


def test_an_unknown_variant_is_refused_with_the_known_ones():
    with pytest.raises(UnsupportedModelError, match="no variant 'neon'; there are amx, avx512, avx2"):
        library.load("neon")


def test_a_library_is_stale_once_a_source_is_newer(tmp_path):
    build = load_build()
    target = tmp_path / build.library_name("avx2")
    assert build.is_stale(target)
    target.touch()
    assert not build.is_stale(target)
    os.utime(target, (1, 1))
    assert build.is_stale(target)


def test_without_a_compiler_nothing_is_built_and_nothing_fails(tmp_path, monkeypatch):
    build = load_build()
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert build.build(tmp_path) == []


def test_a_compiler_that_fails_leaves_no_library(tmp_path, monkeypatch, capfd):
    build = load_build()
    if build.compiler() is None:
        pytest.skip("not on this machine")
    monkeypatch.setenv("CXX", "false")
    (tmp_path / build.library_name("avx2")).touch()
    os.utime(tmp_path / build.library_name("avx2"), (1, 1))
    assert build.build(tmp_path) == []
    assert list(tmp_path.iterdir()) == []
    assert "cannot compile the variant avx2" in capfd.readouterr().err


def test_a_library_with_a_sanitizer_is_not_built_into_the_package(monkeypatch, capsys):
    build = load_build()
    monkeypatch.setattr("sys.argv", ["build.py", "--sanitize", "thread"])
    with pytest.raises(SystemExit):
        build.main()
    assert "--sanitize needs --into" in capsys.readouterr().err


def test_build_and_library_know_the_same_variants():
    build = load_build()
    assert set(build.FLAGS) == set(library.VARIANTS)
    for variant, flags in build.FLAGS.items():
        assert {flag.replace("-", "_") for flag in flags} == {
            flag.replace("avx512_", "avx512") for flag in library.VARIANTS[variant]
        }
