"""Drives other engines: our passes and eviction policies in vLLM, and our settings as others write them."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.adapters.chunk_tree import ChunkTree as ChunkTree
    from sagellm.adapters.pass_driver import PassDriver as PassDriver
    from sagellm.adapters.pass_settings import PassSettings as PassSettings
    from sagellm.adapters.request_table import RequestTable as RequestTable
    from sagellm.adapters.step_orders import StepOrders as StepOrders, orders_of as orders_of
    from sagellm.adapters.waiting_line import WaitingLine as WaitingLine

__version__ = "0.2.0"

_MODULE_OF = {
    "ChunkTree": ".chunk_tree",
    "PassDriver": ".pass_driver",
    "PassSettings": ".pass_settings",
    "RequestTable": ".request_table",
    "StepOrders": ".step_orders",
    "WaitingLine": ".waiting_line",
    "orders_of": ".step_orders",
}

__all__ = sorted(["__version__", *_MODULE_OF])

__getattr__ = lazy(__name__, _MODULE_OF)
