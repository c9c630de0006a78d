"""Breaks lines between words while text streams in."""

from __future__ import annotations

from collections.abc import Callable

from rich.cells import cell_len

_TAB = 8


class WordWrap:
    """Takes pieces of text and returns what can be shown, with lines broken before words.

    A word is held back until it is complete, since only then is it known whether it fits; `end` returns
    the last one. Lines may also be broken next to characters that take two columns. `width` is called for
    every word, since windows are resized.
    """

    def __init__(self, width: Callable[[], int]) -> None:
        self._width = width
        self._column = 0  # after the returned text
        self._space = ""  # before the word
        self._word = ""

    def feed(self, text: str) -> str:
        """Take a piece and return what is now complete."""
        shown: list[str] = []
        for char in text:
            if char == "\n":
                shown += [self._take_word(), "\n"]
                self._column, self._space = 0, ""
            elif char in " \t":
                shown.append(self._take_word())
                self._space += char
            else:
                if self._word and (_is_wide(char) or _is_wide(self._word[-1])):
                    shown.append(self._take_word())
                self._word += char
        return "".join(shown)

    def end(self) -> str:
        """Return what was held back; the next piece begins a new line."""
        last = self._take_word() + self._space
        self._column, self._space = 0, ""
        return last

    def _take_word(self) -> str:
        word, self._word = self._word, ""
        if not word:
            return ""
        space, self._space = self._space, ""
        width = max(1, self._width())
        begin = self._after(space)
        if begin + cell_len(word) <= width:
            self._column = begin + cell_len(word)
            return space + word
        # The terminal itself wraps a word longer than a line, so that it can be copied whole.
        self._column = (cell_len(word) - 1) % width + 1
        return f"\n{word}" if begin else word

    def _after(self, space: str) -> int:
        column = self._column
        for char in space:
            column += _TAB - column % _TAB if char == "\t" else 1
        return column


def _is_wide(char: str) -> bool:
    return cell_len(char) == 2
