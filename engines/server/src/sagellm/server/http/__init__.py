"""The HTTP server over one engine: OpenAI's completions and chat completions."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.server.http.access_control import check_access as check_access
    from sagellm.server.http.app import create_app as create_app
    from sagellm.server.http.engine_front import EngineFront as EngineFront, Stream as Stream
    from sagellm.server.http.server import make_server as make_server

_MODULE_OF = {
    "EngineFront": ".engine_front",
    "Stream": ".engine_front",
    "check_access": ".access_control",
    "create_app": ".app",
    "make_server": ".server",
}

__all__ = sorted(_MODULE_OF)

__getattr__ = lazy(__name__, _MODULE_OF)
