"""Rebuilds the native library of a source tree whose sources have changed, and loads it for tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sagellm.accel.native.library import FOLDER, VARIANTS, NativeLibrary, load
from sagellm.core import UnsupportedModelError

sys.path.append(str(Path(__file__).parent))  # for the modules that tests share
from native_build import load_build


@pytest.fixture(scope="session", autouse=True)
def _fresh_library() -> None:
    """One process builds at a time; an installed wheel is left as it is."""
    build = load_build()
    if build.TARGET == FOLDER and build.compiler() is not None:
        with build.one_at_a_time():
            build.build()


@pytest.fixture(scope="session", params=list(VARIANTS))
def library(request: pytest.FixtureRequest) -> NativeLibrary:
    """One after another, the variants that were built and that this CPU runs."""
    try:
        return load(str(request.param))
    except UnsupportedModelError as error:
        pytest.skip(str(error))
