"""A status line that says what the program is waiting for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def status_line(text: str) -> Iterator[None]:
    """Show that work is in progress: animated on a terminal, printed once elsewhere."""
    if not sys.stderr.isatty():
        typer.echo(text, err=True)
        yield
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(Text(text)):
        yield
