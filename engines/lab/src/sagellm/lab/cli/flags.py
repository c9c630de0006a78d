"""Flags that the lab's commands make from tables, and those that several of them have."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer

from sagellm.core import ConfigError
from sagellm.engines.cli.flags import make_flag
from sagellm.engines.cli.names import complete_providers


def find_trace(path: Path | None) -> Path | None:
    """Return the path of a trace, or of the recording of this name. Raises ConfigError for neither."""
    if path is None or path.exists() or path.name != str(path):
        return path
    from sagellm.engines.config.sources import load_config
    from sagellm.engines.recording.recorder_admin import recordings_folder

    folder = recordings_folder(load_config({}).config.recording)
    recording = folder / f"{path.name.removesuffix('.jsonl')}.jsonl"
    if not recording.exists():
        raise ConfigError(
            f"there is neither a trace {path} here nor a recording {recording}; name a file, or what "
            "`sage llm engine record start` recorded"
        )
    return recording


AsJSON = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Source = Annotated[
    Path,
    typer.Argument(metavar="TRACE", help="The trace to read, or a recording's name.", callback=find_trace),
]
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
