"""Serves an engine: the OpenAI API over HTTP, and the engine in a process of its own, which is supervised."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.server.http.app import create_app as create_app
    from sagellm.server.remote.admin_client import AdminClient as AdminClient
    from sagellm.server.remote.remote_engine import RemoteEngine as RemoteEngine
    from sagellm.server.remote.running_engine import RunningEngine as RunningEngine

__version__ = "0.2.0"

_MODULE_OF = {
    "AdminClient": ".remote.admin_client",
    "RemoteEngine": ".remote.remote_engine",
    "RunningEngine": ".remote.running_engine",
    "create_app": ".http.app",
}

__all__ = sorted(["__version__", *_MODULE_OF])

__getattr__ = lazy(__name__, _MODULE_OF)
