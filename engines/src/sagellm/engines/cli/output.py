"""How commands print: JSON for programs, aligned columns for people."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

import typer
from typer.core import TyperGroup

from sagellm.core import get_logger
from sagellm.engines.cli.streams import is_utf8
from sagellm.engines.logging import is_json


def new_app(help_text: str, group: type[TyperGroup] = TyperGroup) -> typer.Typer:
    """Build the app of a command that has subcommands, including those of `group`."""
    app = typer.Typer(
        cls=group, help=help_text, add_completion=False, rich_markup_mode=None, no_args_is_help=True
    )
    app.callback()(_nothing)
    return app


def _nothing() -> None:
    """Force typer to keep a single command as a subcommand."""


def print_json(value: object) -> None:
    """Print a value, dataclasses included, as indented JSON."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=not is_utf8(), default=_plain))


def print_json_line(value: object) -> None:
    """Print a value as one line of JSON, for programs that read line by line."""
    typer.echo(json.dumps(value, ensure_ascii=not is_utf8(), default=_plain))


def tell(text: str, level: int = logging.INFO) -> None:
    """Tell the operator of a server: a line on standard error, or a record at any level of a log of JSON."""
    if not is_json():
        prefix = "" if level < logging.WARNING else f"{logging.getLevelName(level).lower()}: "
        typer.echo(prefix + text, err=True)
        return
    logger = get_logger("sagellm.operator")
    logger.setLevel(logging.INFO)
    logger.log(level, "%s", text)


def _plain(value: object) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if hasattr(value, "tolist"):  # a hidden state
        return value.tolist()
    return list(value) if isinstance(value, Sequence) else str(value)  # log-probabilities, and their bytes


def columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Align rows under their heads, two spaces apart; plain text that `grep` and `cut` like."""
    table = [head, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    )
    return "\n".join(lines)
