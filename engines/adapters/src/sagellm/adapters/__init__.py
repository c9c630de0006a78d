"""Drives other engines: our passes and eviction policies in vLLM, and our settings as others write them."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.adapters.chunk_tree import ChunkTree as ChunkTree
    from sagellm.adapters.pass_driver import PassDriver as PassDriver
    from sagellm.adapters.pass_settings import PassSettings as PassSettings
    from sagellm.adapters.request_table import RequestTable as RequestTable
    from sagellm.adapters.step_decisions import StepDecisions as StepDecisions, decisions_of as decisions_of
    from sagellm.adapters.waiting_queue import WaitingQueue as WaitingQueue

__version__ = "0.2.0"

_MODULE_OF = {
    "ChunkTree": ".chunk_tree",
    "PassDriver": ".pass_driver",
    "PassSettings": ".pass_settings",
    "RequestTable": ".request_table",
    "StepDecisions": ".step_decisions",
    "WaitingQueue": ".waiting_queue",
    "decisions_of": ".step_decisions",
}

__all__ = sorted(["__version__", *_MODULE_OF])

__getattr__ = lazy(__name__, _MODULE_OF)
