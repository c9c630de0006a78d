"""Old import paths of modules that moved in 0.2: they work until 0.3, and warn."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MOVED = {
    "sagellm.core.conformance": "sagellm.testing.conformance",
    "sagellm.core.testing": "sagellm.testing",
    "sagellm.engines.bench": "sagellm.lab.bench",
    "sagellm.engines.http": "sagellm.server.http",
    "sagellm.engines.input_processor": "sagellm.engines.requests.input_processor",
    "sagellm.engines.output_processor": "sagellm.engines.requests.output_processor",
    "sagellm.engines.output_stream": "sagellm.engines.requests.output_stream",
    "sagellm.engines.outputs": "sagellm.engines.requests.outputs",
    "sagellm.engines.plots": "sagellm.lab.plots",
    "sagellm.engines.prompts": "sagellm.engines.requests.prompts",
    "sagellm.engines.queued_request": "sagellm.engines.requests.queued_request",
    "sagellm.engines.remote": "sagellm.server.remote",
    "sagellm.engines.request_checks": "sagellm.engines.requests.request_checks",
    "sagellm.engines.request_driver": "sagellm.engines.requests.request_driver",
    "sagellm.engines.serve": "sagellm.server.serve",
    "sagellm.engines.simulation": "sagellm.lab.simulation",
    "sagellm.engines.text.process": "sagellm.server.text_process",
    "sagellm.engines.traces": "sagellm.lab.traces",
}


class _Alias:
    """A loader that gives a module under its old name, as it is."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Undo what the import system has just written to it."""
        module.__spec__ = self._spec


class _MovedModules:
    """A finder of modules under their old names. Asked first: where a package is known by its
    old name, its modules would be found, and run again, under theirs.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Import the module from where it is now. Raises ImportError if its distribution is missing."""
        if not fullname.startswith("sagellm."):
            return None
        old = fullname
        while old and old not in _MOVED:
            old = old.rpartition(".")[0]
        if not old:
            return None
        new = _MOVED[old] + fullname.removeprefix(old)
        try:
            module = import_module(new)
        except ModuleNotFoundError as error:
            distribution = "-".join(new.split(".")[:2])
            raise ModuleNotFoundError(
                f"{fullname} is {new} now, which cannot be imported ({error}); pip install {distribution}",
                name=fullname,
            ) from error
        warnings.warn(
            f"{fullname} is {new} now; the old name goes with 0.3", DeprecationWarning, stacklevel=2
        )
        alias: Any = _Alias(module)  # deriving from importlib.abc's Loader would take 12 ms to import it
        return ModuleSpec(fullname, alias, is_package=hasattr(module, "__path__"))


def find_moved_modules() -> None:
    """Let old names be imported, from now on."""
    if not any(isinstance(finder, _MovedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, _MovedModules())
