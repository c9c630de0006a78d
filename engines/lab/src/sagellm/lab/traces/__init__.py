"""Load traces: reads every format known to an installed reader, and writes our own."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.lab.traces.read import read_trace as read_trace
    from sagellm.lab.traces.sagellm import write_trace as write_trace

_MODULE_OF = {"read_trace": ".read", "write_trace": ".sagellm"}

__all__ = sorted(_MODULE_OF)

__getattr__ = lazy(__name__, _MODULE_OF)
