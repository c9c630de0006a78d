"""xgrammar's compiled part, without what its package imports for parts that are not used here.

`import xgrammar` imports torch and transformers. Both the process that compiles and the engine, while others'
tokens are computed, would wait seconds for them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from typing import Any

_PACKAGE = "xgrammar"


def xgrammar_core() -> Any:
    """Return the module with TokenizerInfo, GrammarCompiler, CompiledGrammar and GrammarMatcher.

    Raises ImportError unless xgrammar is installed.
    """
    if _PACKAGE not in sys.modules:
        spec = find_spec(_PACKAGE)
        if spec is None:
            raise ModuleNotFoundError(f"there is no module {_PACKAGE}", name=_PACKAGE)
        _enter(spec)
    with _torch_hidden():  # its tvm_ffi imports torch where it finds it, and does without
        import xgrammar.exception  # so that its errors are RuntimeErrors
        import xgrammar.load_binding  # noqa: F401
        import xgrammar.tvm_ffi_binding as core

    return core


@contextmanager
def _torch_hidden() -> Iterator[None]:
    """Have this thread find no torch inside the block, unless it is imported already; others find it."""
    hidden = _Hidden()
    sys.meta_path.insert(0, hidden)
    try:
        yield
    finally:
        sys.meta_path.remove(hidden)


class _Hidden(MetaPathFinder):
    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == "torch" and threading.get_ident() == self._thread:
            raise ModuleNotFoundError("torch is not needed here", name=name)


def _enter(spec: ModuleSpec) -> None:
    """Have the package in `sys.modules`, and executed only when somebody asks for what it defines."""
    package = module_from_spec(spec)
    assert spec.loader is not None, "a regular package"
    execute = spec.loader.exec_module

    def complete(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        package.__dict__.pop("__getattr__", None)
        execute(package)
        return getattr(package, name)

    package.__dict__["__getattr__"] = complete
    sys.modules[_PACKAGE] = package
