"""Serving in two processes: a front that faces clients, and a core that runs the model."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.engines.serving.admin_client import AdminClient as AdminClient
    from sagellm.engines.serving.core_server import CoreServer as CoreServer
    from sagellm.engines.serving.front import Front as Front
    from sagellm.engines.serving.running_engine import (
        EngineLock as EngineLock,
        RunningEngine as RunningEngine,
    )
    from sagellm.engines.serving.socket_client import SocketClient as SocketClient

__all__ = ["AdminClient", "CoreServer", "EngineLock", "Front", "RunningEngine", "SocketClient"]

__getattr__ = lazy(
    __name__,
    {
        "AdminClient": ".admin_client",
        "CoreServer": ".core_server",
        "EngineLock": ".running_engine",
        "Front": ".front",
        "RunningEngine": ".running_engine",
        "SocketClient": ".socket_client",
    },
)
