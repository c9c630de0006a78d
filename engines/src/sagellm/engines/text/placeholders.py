"""Placeholders in a text that stand for token ids, so that no tokenizer sees the text they replace."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence


class Placeholders:
    """Marks to write into a text, and the token ids that replace them.

    A mark is 32 random hexadecimal digits: nobody can guess it, and templates leave it alone.
    """

    def __init__(self) -> None:
        self._token_ids: dict[str, Sequence[int]] = {}
        self._mark_of: dict[object, str] = {}

    def mark(self, key: object, token_ids: Sequence[int]) -> str:
        """Return the mark of a key, created on first use, which stands for the token ids."""
        if key not in self._mark_of:
            self._mark_of[key] = secrets.token_hex(16)
            self._token_ids[self._mark_of[key]] = token_ids
        return self._mark_of[key]

    def encode(self, text: str, encode: Callable[[str], Sequence[int]]) -> list[int]:
        """Encode the text between the marks, and insert their token ids."""
        pieces = re.split(f"({'|'.join(self._token_ids)})", text) if self._token_ids else [text]
        token_ids: list[int] = []
        for piece in pieces:
            if piece:
                known = self._token_ids.get(piece)
                token_ids += encode(piece) if known is None else known
        return token_ids
