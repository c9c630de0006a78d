"""Flags that the lab's commands make from tables, and those that several of them have."""

from __future__ import annotations

import inspect
from typing import Annotated, Any

import typer

from sagellm.engines.cli.flags import make_flag

AsJSON = Annotated[bool, typer.Option("--json", help="Print JSON.")]

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
