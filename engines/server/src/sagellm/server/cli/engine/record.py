"""`engine record start|stop|status`: records what a running engine serves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from sagellm.engines.cli.output import new_app
from sagellm.engines.sizes import format_bytes
from sagellm.server.cli.running import AsJson, EngineArgument, EngineName, ask, show

app = new_app("Record what a running engine serves, as a trace for `simulate` and predictors.")


@app.command()
def start(
    name: Annotated[
        str, typer.Argument(metavar="[NAME]", help="The recording's name: NAME.jsonl in recording.folder.")
    ] = "traffic",
    *,
    text: Annotated[
        bool,
        typer.Option("--text", help="Record the tokens of prompts and answers, their text, too."),
    ] = False,
    engine: EngineName = None,
    as_json: AsJson = False,
) -> None:
    """Begin to record: salted hashes of prompts' blocks, lengths, times; no text unless asked for.

    A recording of the same name is kept as NAME.jsonl.1. It ends with the engine, or with `record stop`.
    """
    found = ask("record_start", engine, name=name, text=text)
    show(found, describe(found), as_json=as_json)


@app.command()
def stop(name: EngineArgument = None, *, engine: EngineName = None, as_json: AsJson = False) -> None:
    """End the recording; requests that have ended are in the file, those that still run are not."""
    found = ask("record_stop", name, engine)
    show(found, describe(found), as_json=as_json)


@app.command()
def status(name: EngineArgument = None, *, engine: EngineName = None, as_json: AsJson = False) -> None:
    """Say whether an engine records, where, and how much."""
    found = ask("record_status", name, engine)
    show(found, describe(found), as_json=as_json)


def describe(found: Mapping[str, Any]) -> Iterator[str]:
    """Say in lines what was recorded."""
    if not found["path"]:
        yield "nothing is recorded; begin with: sage llm engine record start"
        return
    what = "with their text" if found["has_text"] else "without text"
    verb = "recording" if found["is_recording"] else "recorded"
    count, size = f"{found['num_recorded']:,} requests", format_bytes(found["num_bytes"])
    yield f"{verb} to {found['path']}, {what}: {count}, {size}"
    if found.get("num_unfinished"):
        count = f"{found['num_unfinished']:,} more"
        yield f"{count} still run and are not in it: a request is recorded when it ends"
    if found["num_dropped"]:
        yield f"{found['num_dropped']:,} more were dropped"
    if found["failure"]:
        yield f"it ended by itself: {found['failure']}"
