"""A line that says what one waits for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def status_line(text: str) -> Iterator[None]:
    """Show that something goes on: moving on a terminal, once elsewhere."""
    if not sys.stderr.isatty():
        typer.echo(text, err=True)
        yield
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(Text(text)):
        yield
