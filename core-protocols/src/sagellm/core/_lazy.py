"""Lazy package attributes, so that importing a package imports none of its modules (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def lazy(package: str, table: Mapping[str, str]) -> Callable[[str], object]:
    """Make a module `__getattr__` that imports a name's module on first use.

    `table` maps each public name to the module that defines it, relative to `package`
    (`{"LRUEvictionPolicy": ".lru"}`). The value is kept on the package, so the second
    access is an ordinary attribute. Raises AttributeError for a name that is not in the table.
    """

    def __getattr__(name: str) -> object:
        module = table.get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(module, package), name)
        setattr(sys.modules[package], name, value)
        return value

    return __getattr__
