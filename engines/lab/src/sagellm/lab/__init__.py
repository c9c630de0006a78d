"""Measures engines and servers, and runs recorded load through the serving code without a model."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.lab.bench.serve import run_serve as run_serve
    from sagellm.lab.bench.settings import LoadSettings as LoadSettings
    from sagellm.lab.traces.read import read_trace as read_trace
    from sagellm.lab.traces.sagellm import write_trace as write_trace

__version__ = "0.2.0"

_MODULE_OF = {
    "LoadSettings": ".bench.settings",
    "read_trace": ".traces.read",
    "run_serve": ".bench.serve",
    "write_trace": ".traces.sagellm",
}

__all__ = sorted(["__version__", *_MODULE_OF])

__getattr__ = lazy(__name__, _MODULE_OF)
