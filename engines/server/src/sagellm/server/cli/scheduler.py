"""`scheduler stats|passes`: the scheduler of a running engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from sagellm.core.plugins.option_text import options_text
from sagellm.engines.cli.output import columns
from sagellm.server.cli.running import AsJson, EngineArgument, EngineName, ask, show
from sagellm.server.cli.stats import scheduler as app


@app.command()
def passes(name: EngineArgument = None, *, engine: EngineName = None, as_json: AsJson = False) -> None:
    """Show the scheduler's passes in the order in which they run, and which failed and were removed.

    `policy set passes` changes them.
    """
    found = ask("passes", name, engine)
    before = [("order", found["stages"]["order"]), *(("-", each) for each in found["passes"])]
    after = [(stage, each) for stage, each in found["stages"].items() if stage != "order"]
    rows = [(stage, *_named(each, found["failures"])) for stage, each in (*before, *after)]
    show(found, [columns(("STAGE", "PASS", "OPTIONS"), rows)], as_json=as_json)
    for failed, why in () if as_json else found["failures"].items():
        typer.echo(f"{failed} failed and was removed; setting passes tries it again: {why}", err=True)


def _named(each: Any, failures: Mapping[str, str]) -> tuple[str, str]:
    """Return the name and the options of a provider in its plain form, and say if it failed."""
    if each is None:
        return "none", ""
    name, options = (each, "") if isinstance(each, str) else (each["name"], options_text(each["options"]))
    return (f"{name} (failed)" if name + options in failures else name), options
