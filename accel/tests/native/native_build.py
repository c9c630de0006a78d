"""The script that compiles the native library, as a module."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

BUILD = Path(__file__).parents[2] / "native" / "build.py"


def load_build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sagellm_native_build", BUILD)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
