"""Flags that the lab's commands make from tables, and those that several of them have."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer

from sagellm.engines.cli.flags import make_flag
from sagellm.engines.cli.names import complete_providers

AsJSON = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Source = Annotated[Path, typer.Argument(metavar="TRACE", help="The trace to read.")]
Reader = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="The trace's reader; else the file shows its format.",
        autocompletion=complete_providers("trace_reader"),
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", "--force", help="Overwrite FILE if it exists, without asking.")
]

LENGTHS = "512, uniform:LOW:HIGH, normal:MEAN:SD, lognormal:MEDIAN:SIGMA or exponential:MEAN"


def flag(
    name: str, kind: Any, metavar: str, text: str, *spelled: str, group: str | None = None, **more: Any
) -> inspect.Parameter:
    """Make a flag that is None unless it is given, `--name` unless it is `spelled` otherwise."""
    option: Any = typer.Option(
        *(spelled or (f"--{name.replace('_', '-')}",)),
        metavar=metavar,
        help=text,
        show_default=False,
        rich_help_panel=group,
        **more,
    )
    return make_flag(name, kind, option)
