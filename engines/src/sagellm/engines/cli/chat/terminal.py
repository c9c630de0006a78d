"""Where a conversation is read from and written to: a terminal, or a pipe."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from contextlib import suppress

import typer

from sagellm.engines.cli.chat.wrapping import WordWrap

_PROMPT, _PROMPT_WITHIN = "> ", ". "
_QUOTES = '"""'
_HARMLESS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class Terminal:
    """Answers go to standard output, all else to standard error."""

    def __init__(self) -> None:
        self.is_interactive = sys.stdin.isatty()
        self._shows_output = sys.stdout.isatty()
        self._typed: Callable[[], str] = str  # the line so far, if it can be known
        self._is_quoting = False
        if self.is_interactive and self._shows_output:
            with suppress(ImportError):  # line editing, and the lines typed before
                import readline

                # Bracketed paste delivers pasted text as one line, newlines included; Python turns that off.
                # Without GNU readline the lines come one by one, and quotes keep them together.
                readline.parse_and_bind("set enable-bracketed-paste on")
                self._typed = readline.get_line_buffer
        self._wrap = WordWrap(_columns)

    def read(self) -> str | None:
        """Return the next question, not blank, or None at the end and on a second Ctrl-C in a row.

        The first Ctrl-C may have been meant for an answer that has just ended, and one after typed text
        clears that text. On a terminal, three quotes begin and end a text of several lines.
        """
        is_interrupted = False
        while True:
            try:
                line = self._read_text().strip()
            except (EOFError, KeyboardInterrupt) as end:
                if self.is_interactive:
                    typer.echo(err=True)
                is_second = is_interrupted and not (self._typed() or self._is_quoting)
                if isinstance(end, EOFError) or is_second or not self.is_interactive:
                    return None
                is_interrupted = True
                self.tell("Ctrl-D leaves, and so does another Ctrl-C")
                continue
            if line:
                return line
            is_interrupted = False

    def write(self, text: str) -> None:
        """Write a piece of an answer; on a terminal, break lines between words.

        A model cannot move a terminal's cursor or change its colours.
        """
        typer.echo(self._wrap.feed(text.translate(_HARMLESS)) if self._shows_output else text, nl=False)

    def think(self, text: str) -> None:
        """Write a piece of a model's reasoning, dimmed; only on a terminal, as it is not the answer."""
        if self._shows_output:
            typer.echo(typer.style(self._wrap.feed(text.translate(_HARMLESS)), dim=True), nl=False)

    def end_answer(self) -> None:
        """End an answer's line."""
        typer.echo(self._wrap.end() if self._shows_output else "")

    def tell(self, text: str) -> None:
        """Print a message that is not part of an answer."""
        typer.echo(self._wrapped(text), err=True)

    def whisper(self, text: str) -> None:
        """Print a side note, only for people."""
        if self.is_interactive and self._shows_output:
            typer.echo(typer.style(self._wrapped(text), dim=True), err=True)

    def _wrapped(self, text: str) -> str:
        if not self._shows_output:
            return text
        wrap = WordWrap(_columns)
        return wrap.feed(text) + wrap.end()

    def _read_text(self) -> str:
        self._is_quoting = False
        line = self._read_line(_PROMPT)
        if not self.is_interactive or not line.lstrip().startswith(_QUOTES):
            return line
        text = line.lstrip().removeprefix(_QUOTES)
        self._is_quoting = True
        while not text.rstrip().endswith(_QUOTES):
            text += "\n" + self._read_line(_PROMPT_WITHIN).rstrip("\n")
        return text.rstrip().removesuffix(_QUOTES)

    def _read_line(self, prompt: str) -> str:
        if self.is_interactive and self._shows_output:
            return input(prompt)
        if self.is_interactive:
            typer.echo(prompt, nl=False, err=True)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line


def _columns() -> int:
    return shutil.get_terminal_size().columns
