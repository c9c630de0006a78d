"""How admin commands reach a running engine."""

from __future__ import annotations

from typing import Annotated

import typer

from sagellm.engines.cli.names import complete_engine
from sagellm.engines.remote import AdminClient, RunningEngine

ANSWER_S = 15.0
"""An engine answers between two steps; one that takes longer is loading, or stuck."""

EngineName = Annotated[
    str | None,
    typer.Option(
        "--engine", metavar="NAME", help="Which engine, where several run.", autocompletion=complete_engine
    ),
]


def connect(name: str | None, *, timeout_s: float = ANSWER_S) -> tuple[RunningEngine, AdminClient]:
    """Connect to the engine of a name, or to the only one.

    Raises UnknownNameError if it does not run, EngineError if it does not answer.
    """
    engine = RunningEngine.find(name)
    return engine, AdminClient.connect(engine.socket, timeout_s=timeout_s)
