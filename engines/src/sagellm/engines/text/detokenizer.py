"""Text from tokens as they arrive, piece by piece, and never half a character."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol

from sagellm.engines.text.guarded_tokenizer import decode

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_LONG = 32
_KEPT = 8
"""Pending tokens above which the window is shortened, and how many remain; a character has at most four."""


class _Decoder(Protocol):
    def decode(self, token_ids: list[int]) -> str: ...

    def is_byte(self, token_id: int) -> bool: ...

    def is_silent(self, token_id: int) -> bool: ...


class IncrementalDetokenizer:
    """Decodes one sequence. The pieces joined equal `tokenizer.decode` of all its ids exactly.

    `tokenizer` is a `tokenizers.Tokenizer` or one of transformers'; text is never cleaned up
    (`clean_up_tokenization_spaces`), as that changes text already returned. A piece ends where no later token
    can change it: incomplete UTF-8 waits, and so does a run of byte tokens (`<0xE2>`), all of which
    tokenizers turns into replacement characters if any part is malformed.

    Each step decodes a window that begins with text already returned, so that special treatment of the very
    first token — stripping a space — affects only that. O(1) amortised per token.
    """

    # ids:  [0, read)     context, its text is returned
    #       [read, …)     pending, `returned` characters of the window are returned

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        self._decoder = _decoder(tokenizer, skip_special_tokens=skip_special_tokens)
        self._ids: list[int] = []
        self._read = 0
        self._num_returned = 0
        self._num_final = 0  # ids whose text is final, except for an incomplete character

    def append(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens and return the text that became final, usually but not always theirs."""
        start = len(self._ids)
        self._ids += map(int, token_ids)
        num_final = self._num_final
        for index in range(start, len(self._ids)):
            token_id = self._ids[index]
            if not self._decoder.is_silent(token_id) and not self._decoder.is_byte(token_id):
                num_final = index + 1
        if num_final == self._num_final:
            return ""
        self._num_final = num_final
        text = self._decoder.decode(self._ids[:num_final])
        certain = text.removesuffix(REPLACEMENT)
        piece = certain[self._num_returned :]
        self._num_returned = max(self._num_returned, len(certain))
        if certain == text and piece:
            self._move()
        elif num_final - self._read > _LONG:
            self._shorten()
        return piece

    def finish(self) -> str:
        """Return the rest; no more tokens will come."""
        piece = self._decoder.decode(self._ids)[self._num_returned :]
        self._num_returned += len(piece)
        return piece

    def _move(self) -> None:
        """Drop the context; the final ids become the next one."""
        context = self._ids[self._read : self._num_final]
        self._ids = self._ids[self._read :]
        self._read = self._num_final = len(context)
        self._num_returned = len(self._decoder.decode(context))

    def _shorten(self) -> None:
        """Drop most of the context even though a run of malformed characters continues.

        Wherever a window begins, it resynchronizes with the character boundaries within a few tokens. Up to
        there its count may differ; the difference of the two lengths corrects for that.
        """
        border = self._num_final - _KEPT
        context = self._decoder.decode(self._ids[self._read : border])
        if context:
            self._num_returned += len(context) - len(self._decoder.decode(self._ids[:border]))
            self._ids = self._ids[self._read :]
            self._num_final -= self._read
            self._read = border - self._read


class _BackendDecoder:
    """A `tokenizers.Tokenizer`, which most transformers tokenizers wrap."""

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._special: set[int] = set()
        if skip_special_tokens:
            added = tokenizer.get_added_tokens_decoder()
            self._special = {token_id for token_id, token in added.items() if token.special}

    def decode(self, token_ids: list[int]) -> str:
        return decode(self._tokenizer, token_ids, skip_special_tokens=self._skip)

    def is_byte(self, token_id: int) -> bool:
        token = self._tokenizer.id_to_token(token_id)
        return token is not None and _BYTE_TOKEN.fullmatch(token) is not None

    def is_silent(self, token_id: int) -> bool:
        return token_id in self._special or self._tokenizer.id_to_token(token_id) is None


class _PythonDecoder:
    """A transformers tokenizer written in Python."""

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        self._special = set(tokenizer.all_special_ids) if skip_special_tokens else set()

    def decode(self, token_ids: list[int]) -> str:
        return decode(self._tokenizer, token_ids, **self._options)

    def is_byte(self, token_id: int) -> bool:
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        return isinstance(token, str) and _BYTE_TOKEN.fullmatch(token) is not None

    def is_silent(self, token_id: int) -> bool:
        return token_id in self._special


def _decoder(tokenizer: Any, *, skip_special_tokens: bool) -> _Decoder:
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if hasattr(backend, "id_to_token"):
        return _BackendDecoder(backend, skip_special_tokens=skip_special_tokens)
    return _PythonDecoder(tokenizer, skip_special_tokens=skip_special_tokens)
