"""An answer with reasoning in front, as a terminal shows it."""

from __future__ import annotations

from collections.abc import Sequence

from sagellm.core.protocols.parsers import AnswerParser, AnswerPart, Content, Reasoning
from sagellm.engines.cli.chat.terminal import Terminal


class ReasoningView:
    """Writes reasoning dimmed and, after a blank line, the content."""

    def __init__(self, parser: AnswerParser, terminal: Terminal) -> None:
        self._parser, self._terminal = parser, terminal
        self._is_thinking = False

    def write(self, text: str) -> None:
        """Take the next text of the answer."""
        self._show(self._parser.feed(text))

    def end(self) -> None:
        """Write what was held back."""
        self._show(self._parser.finish())

    def _show(self, parts: Sequence[AnswerPart]) -> None:
        for part in parts:
            if isinstance(part, Reasoning):
                self._terminal.think(part.text)
                self._is_thinking = True
            elif isinstance(part, Content):
                if self._is_thinking:
                    self._terminal.think("\n\n")
                    self._is_thinking = False
                self._terminal.write(part.text)
