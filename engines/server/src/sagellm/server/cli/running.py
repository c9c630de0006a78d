"""How admin commands reach a running engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import typer

from sagellm.core import ConfigError
from sagellm.engines.cli.output import print_json
from sagellm.server.cli.names import complete_engine
from sagellm.server.remote import AdminClient, RunningEngine

ANSWER_S = 15.0
"""An engine answers between two steps; one that takes longer is loading, or stuck."""

EngineName = Annotated[
    str | None,
    typer.Option(
        "--engine", metavar="NAME", help="Which engine, where several run.", autocompletion=complete_engine
    ),
]

EngineArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[ENGINE]",
        help="Which engine, where several run; --engine does the same.",
        autocompletion=complete_engine,
    ),
]
"""For commands that have no other argument."""

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def find_engine(*names: str | None) -> RunningEngine:
    """Return the engine that an argument or --engine names, or else the only one.

    Raises ConfigError if the two differ, UnknownNameError if it does not run.
    """
    given = [name for name in dict.fromkeys(names) if name is not None]
    if len(given) > 1:
        raise ConfigError(f"two engines are named, {given[0]} and --engine {given[1]}; name one")
    return RunningEngine.find(given[0] if given else None)


def connect(*names: str | None, timeout_s: float = ANSWER_S) -> tuple[RunningEngine, AdminClient]:
    """Connect to the engine of a name, or to the only one.

    Raises as `find_engine`, and EngineError if it does not answer.
    """
    engine = find_engine(*names)
    return engine, AdminClient.connect(engine.socket, timeout_s=timeout_s)


def ask(operation: str, *names: str | None, **arguments: Any) -> Any:
    """Run an operation of an engine and return its result. Raises as `connect`."""
    _, client = connect(*names)
    with client:
        return client.call(operation, **arguments)


def show(found: Any, lines: Iterable[str], *, as_json: bool) -> None:
    """Print a result: as JSON, or as these lines."""
    if as_json:
        print_json(found)
        return
    for line in lines:
        typer.echo(line)
