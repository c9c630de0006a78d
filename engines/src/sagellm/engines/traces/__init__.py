"""Load traces: reads every format known to an installed reader, and writes our own."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.core import TraceRequest as TraceRequest
    from sagellm.engines.traces.read import read_trace as read_trace
    from sagellm.engines.traces.sagellm import write_trace as write_trace

__all__ = ["TraceRequest", "read_trace", "write_trace"]

__getattr__ = lazy(
    __name__, {"TraceRequest": "sagellm.core", "read_trace": ".read", "write_trace": ".sagellm"}
)
