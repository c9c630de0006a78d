"""The repository's other tests, for what uses their machines."""

from __future__ import annotations

from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]


@cache
def load_tests(path: str) -> ModuleType:
    """Import a test module by its path in the repository."""
    spec = spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None, f"{path} is not a module"
    assert spec.loader is not None, f"{path} is not a module"
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
