"""Compiles the native library into the wheel. Without a compiler it is pure; no install fails."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeBuildHook(BuildHookInterface[Any]):
    """Adds `libsage_*.so` to wheels, tagged for any Python on this platform."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile what is stale, in the source tree: an editable install finds it there."""
        if self.target_name != "wheel":
            return
        build = _load(Path(self.root) / "native" / "build.py")
        libraries = build.build()
        if not libraries:
            self.app.display_warning(
                "no C++ compiler for x86-64 Linux: the wheel has no native kernels, torch computes instead"
            )
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{os.environ.get('SAGELLM_WHEEL_PLATFORM', 'linux_x86_64')}"
        build_data["artifacts"] += [f"src/sagellm/accel/native/{library.name}" for library in libraries]


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("sagellm_native_build", path)
    assert spec is not None, "the path names a module"
    assert spec.loader is not None, "the module has a loader"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
