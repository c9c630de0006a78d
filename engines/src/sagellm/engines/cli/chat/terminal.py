"""Where a conversation is read from and written to: a terminal, or a pipe."""

from __future__ import annotations

import sys
from contextlib import suppress

import typer

_PROMPT = "> "
_HARMLESS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class Terminal:
    """Answers go to standard output, all else to standard error."""

    def __init__(self) -> None:
        self.is_interactive = sys.stdin.isatty()
        self._shows_output = sys.stdout.isatty()
        if self.is_interactive and self._shows_output:
            with suppress(ImportError):  # line editing, and the lines typed before
                import readline  # noqa: F401

    def read(self) -> str | None:
        """Return the next line that is not blank, or None at the end and on a second Ctrl-C in a row.

        The first one may have been meant for an answer that has just ended.
        """
        is_interrupted = False
        while True:
            try:
                line = self._read_line().strip()
            except (EOFError, KeyboardInterrupt) as end:
                if self.is_interactive:
                    typer.echo(err=True)
                if isinstance(end, EOFError) or is_interrupted or not self.is_interactive:
                    return None
                is_interrupted = True
                self.tell("Ctrl-D leaves, and so does another Ctrl-C")
                continue
            if line:
                return line
            is_interrupted = False

    def write(self, text: str) -> None:
        """Write a piece of an answer; a model cannot move a terminal's cursor or change its colours."""
        typer.echo(text.translate(_HARMLESS) if self._shows_output else text, nl=False)

    def end_answer(self) -> None:
        """End an answer's line."""
        typer.echo()

    def tell(self, text: str) -> None:
        """Say something that belongs to no answer."""
        typer.echo(text, err=True)

    def whisper(self, text: str) -> None:
        """Say something by the way, to people alone."""
        if self.is_interactive and self._shows_output:
            typer.echo(typer.style(text, dim=True), err=True)

    def _read_line(self) -> str:
        if self.is_interactive and self._shows_output:
            return input(_PROMPT)
        if self.is_interactive:
            typer.echo(_PROMPT, nl=False, err=True)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line
