"""The tree of `sage llm engine`."""

from __future__ import annotations

from sagellm.engines.cli.lazy import Entry, LazyGroup
from sagellm.engines.cli.output import new_app

_HERE = "sagellm.server.cli.engine"


class EngineGroup(LazyGroup):
    """The commands of `sage llm engine`, in the order of an engine's life."""

    table = {  # noqa: RUF012  (typed in the base)
        "start": Entry(f"{_HERE}.start:app", "Serve a model in the background."),
        "status": Entry(f"{_HERE}.status:app", "Show the engines that run."),
        "record": Entry(f"{_HERE}.record:app", "Record what an engine serves, as a trace."),
        "stop": Entry(f"{_HERE}.stop:app", "End an engine."),
    }
    synonyms = dict.fromkeys(("list", "ls", "ps", "show"), "status")


app = new_app("Start, show, record and stop engines.", EngineGroup)
