"""Text from tokens as they arrive, piece by piece, and never half a character."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from typing import Any

from sagellm.engines.text.guarded_tokenizer import decode

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_LONG = 32
_KEPT = 8
"""Pending tokens above which the window is shortened, and how many remain; a character has at most four."""


class Decoder(ABC):
    """What detokenizers of one tokenizer share: its text, and what was learned about its tokens."""

    joins_texts = False
    """Whether the text of tokens is that of the first ones, if these end with a character, and the rest."""

    def __init__(self) -> None:
        self._ends_text: dict[int, bool] = {}

    @abstractmethod
    def decode(self, token_ids: list[int]) -> str:
        """Return the text of tokens. Raises TokenizerError."""

    @abstractmethod
    def is_byte(self, token_id: int) -> bool:
        """Say whether a token is one byte, which tokenizers decodes with its neighbours."""

    @abstractmethod
    def is_silent(self, token_id: int) -> bool:
        """Say whether a token has no text."""

    def ends_text(self, token_id: int) -> bool:
        """Say whether text that ends with this token is final, except for an incomplete character."""
        known = self._ends_text.get(token_id)
        if known is None:
            known = self._ends_text[token_id] = not self.is_silent(token_id) and not self.is_byte(token_id)
        return known


class IncrementalDetokenizer:
    """Decodes one sequence. The pieces joined equal `tokenizer.decode` of all its ids exactly.

    `tokenizer` is a `tokenizers.Tokenizer`, one of transformers', or what `decoder_of` makes of one; text is
    never cleaned up (`clean_up_tokenization_spaces`), as that changes text already returned. A piece ends
    where no later token can change it: incomplete UTF-8 waits, and so does a run of byte tokens (`<0xE2>`),
    all of which tokenizers turns into replacement characters if any part is malformed.

    Each step decodes a window that begins with text already returned, so that special treatment of the very
    first token — stripping a space — affects only that. O(1) amortised per token.
    """

    # ids:  [0, read)     context, its text is returned
    #       [read, …)     pending, `returned` characters of the window are returned

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        self._decoder = decoder_of(tokenizer, skip_special_tokens=skip_special_tokens)
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
            if self._decoder.ends_text(self._ids[index]):
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
        """Drop the context; the final ids become the next one, if the text of later ones depends on them."""
        if self._decoder.joins_texts:
            del self._ids[: self._num_final]
            self._num_final = self._num_returned = 0
            return
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


class _BackendDecoder(Decoder):
    """A `tokenizers.Tokenizer`, which most transformers tokenizers wrap."""

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool) -> None:
        super().__init__()
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


class _ByteLevelDecoder(_BackendDecoder):
    """A `tokenizers.Tokenizer` whose text is the bytes of its tokens, which are looked up only once."""

    joins_texts = True

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool) -> None:
        super().__init__(tokenizer, skip_special_tokens=skip_special_tokens)
        self._bytes: dict[int, bytes] = {}

    def decode(self, token_ids: list[int]) -> str:
        return b"".join(map(self._bytes_of, token_ids)).decode("utf-8", "replace")

    def _bytes_of(self, token_id: int) -> bytes:
        known = self._bytes.get(token_id)
        if known is None:
            token = "" if self.is_silent(token_id) else self._tokenizer.id_to_token(token_id)
            try:
                known = bytes(map(_byte_of_character().__getitem__, token))
            except KeyError:  # an added token
                known = token.encode()
            self._bytes[token_id] = known
        return known


@cache
def _byte_of_character() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for (GPT-2's table)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = sorted(set(range(256)).difference(plain))
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}


class _PythonDecoder(Decoder):
    """A transformers tokenizer written in Python."""

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool) -> None:
        super().__init__()
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


def decoder_of(tokenizer: Any, *, skip_special_tokens: bool) -> Decoder:
    """Return what detokenizers of this tokenizer can share, or a decoder as it is."""
    if isinstance(tokenizer, Decoder):
        return tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if hasattr(backend, "id_to_token"):
        if type(getattr(backend, "decoder", None)).__name__ == "ByteLevel":
            return _ByteLevelDecoder(backend, skip_special_tokens=skip_special_tokens)
        return _BackendDecoder(backend, skip_special_tokens=skip_special_tokens)
    return _PythonDecoder(tokenizer, skip_special_tokens=skip_special_tokens)
