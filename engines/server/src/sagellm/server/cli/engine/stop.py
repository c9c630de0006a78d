"""`engine stop`: ends an engine and reports the outcome."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import Annotated

import typer

from sagellm.core import EngineError
from sagellm.engines.cli.status_line import status_line
from sagellm.server.cli.running import EngineArgument, EngineName, find_engine
from sagellm.server.remote import RunningEngine

_POLL_S = 0.05
_KILLED_S = 10.0

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def stop(
    name: EngineArgument = None,
    *,
    engine: EngineName = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="How long to wait for it to end.")
    ] = 60.0,
    force: Annotated[bool, typer.Option("--force", help="Kill it if it has not ended by then.")] = False,
) -> None:
    """End an engine: it takes no more requests, finishes what it may, and goes."""
    typer.echo(end(find_engine(name, engine), timeout_s=timeout, force=force))


def end(engine: RunningEngine, *, timeout_s: float, force: bool) -> str:
    """End an engine's processes and return what happened. Raises EngineError if it still runs."""
    begun = time.monotonic()
    _signal(engine, signal.SIGTERM)
    with status_line(f"stopping {engine.name} (process {engine.pid})"):
        is_gone = _wait(engine, timeout_s)
    if is_gone:
        return f"stopped {engine.name} after {time.monotonic() - begun:.1f} s"
    if not force:
        raise EngineError(
            f"{engine.name} (process {engine.pid}) still runs after {timeout_s:g} s; it may have requests to "
            f"finish: wait longer with --timeout SECONDS, or kill it with --force"
        )
    _signal(engine, signal.SIGKILL)
    if not _wait(engine, _KILLED_S):
        raise EngineError(f"{engine.name} (process {engine.pid}) was killed and is still there")
    RunningEngine.withdraw_dead()  # it could not clean up itself
    return f"killed {engine.name}, which had not ended within {timeout_s:g} s; its requests are lost"


def _signal(engine: RunningEngine, number: signal.Signals) -> None:
    try:
        with suppress(ProcessLookupError):
            os.kill(engine.pid, number)
    except PermissionError as error:
        raise EngineError(f"{engine.name} (process {engine.pid}) belongs to somebody else") from error


def _wait(engine: RunningEngine, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while engine.is_alive:
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True
