"""An engine whose core runs in a process of its own: started, supervised, and asked over a socket."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.server.remote.admin_client import AdminClient as AdminClient
    from sagellm.server.remote.core_server import CoreServer as CoreServer
    from sagellm.server.remote.remote_engine import RemoteEngine as RemoteEngine
    from sagellm.server.remote.running_engine import (
        EngineLock as EngineLock,
        RunningEngine as RunningEngine,
    )
    from sagellm.server.remote.socket_client import SocketClient as SocketClient

_MODULE_OF = {
    "AdminClient": ".admin_client",
    "CoreServer": ".core_server",
    "EngineLock": ".running_engine",
    "RemoteEngine": ".remote_engine",
    "RunningEngine": ".running_engine",
    "SocketClient": ".socket_client",
}

__all__ = sorted(_MODULE_OF)

__getattr__ = lazy(__name__, _MODULE_OF)
