"""The HTTP server: OpenAI's completions and chat completions over one engine."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.engines.server.admission import Admission as Admission
    from sagellm.engines.server.app import check_access as check_access, create_app as create_app
    from sagellm.engines.server.front import EngineFront as EngineFront, Stream as Stream
    from sagellm.engines.server.runner import HTTPServer as HTTPServer, make_server as make_server

__all__ = ["Admission", "EngineFront", "HTTPServer", "Stream", "check_access", "create_app", "make_server"]

__getattr__ = lazy(
    __name__,
    {
        "Admission": ".admission",
        "EngineFront": ".front",
        "HTTPServer": ".runner",
        "Stream": ".front",
        "check_access": ".app",
        "create_app": ".app",
        "make_server": ".runner",
    },
)
