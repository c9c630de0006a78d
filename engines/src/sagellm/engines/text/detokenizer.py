"""Text from tokens as they arrive, piece by piece, and never half a character."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

from sagellm.engines.text.errors import TokenizerError
from sagellm.engines.text.guarded_tokenizer import decode

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_TOKEN_WEIGHT = 8  # of a token, beside one for each character that it is spelled with
_LONG = 192
_KEPT = 64
"""Weight of pending tokens above which the window is shortened, and what remains; a character has at most
four tokens. Both are far below what decodes in 100 µs."""
_COPIES = 9  # more than the characters that a decoder may strip from both ends
_MAX_SHARED_TEXTS = 1 << 18


class TokenText(NamedTuple):
    """What one token adds to a text: the characters that end with it, and its own bytes.

    A character whose bytes are spread over several tokens belongs to the last of them. Tokens of byte-level
    vocabularies and byte tokens have bytes of their own, those of others are their text in UTF-8. A token
    that is left out of the text has no bytes, and `text` is how the vocabulary spells it.
    """

    text: str
    raw: bytes

    @property
    def num_characters(self) -> int:
        """How many characters of the text are this token's."""
        return len(self.text) if self.raw else 0


NO_TEXT = TokenText("", b"")


class Decoder(ABC):
    """What detokenizers of one tokenizer share: its text, and what was learned about its tokens."""

    joins_texts = False
    """Whether the text of tokens is that of the first ones, if these end with a character, and the rest."""

    def __init__(self) -> None:
        self._ends_text: dict[int, bool] = {}
        self._adds_nothing: dict[int, bool] = {}
        self._weights: dict[int, int] = {}
        self._raw: dict[int, bytes | None] = {}
        self._first: dict[int, TokenText] = {}
        self._shared: dict[tuple[str, bytes], TokenText] = {}

    @abstractmethod
    def decode(self, token_ids: list[int]) -> str:
        """Return the text of tokens. Raises TokenizerError."""

    @abstractmethod
    def is_byte(self, token_id: int) -> bool:
        """Say whether a token is one byte, which tokenizers decodes with its neighbours."""

    @abstractmethod
    def is_silent(self, token_id: int) -> bool:
        """Say whether a token has no text."""

    @abstractmethod
    def spelling(self, token_id: int) -> str:
        """Return how the vocabulary spells a token, "" for an id that it does not have."""

    def raw(self, token_id: int) -> bytes | None:
        """Return a token's own bytes, None if they are those of its text."""
        if token_id not in self._raw:
            byte = self.spelling(token_id)[3:5] if self.is_byte(token_id) else None
            self._raw[token_id] = None if byte is None else bytes.fromhex(byte)
        return self._raw[token_id]

    def text_of(self, token_id: int, text: str) -> TokenText:
        """Return this text as a token's; equal ones are one object, as millions may be kept."""
        raw = self.raw(token_id)
        key = text, text.encode() if raw is None else raw
        known = self._shared.get(key)
        if known is None:
            if len(self._shared) == _MAX_SHARED_TEXTS:
                self._shared.clear()
            known = self._shared[key] = TokenText(*key)
        return known

    def first(self, token_id: int) -> TokenText:
        """Return what a token adds that follows nothing, without a character that it begins."""
        known = self._first.get(token_id)
        if known is None:
            if self.is_silent(token_id):
                known = TokenText(self.spelling(token_id), b"")
            else:
                known = self.text_of(token_id, self.decode([token_id]).removesuffix(REPLACEMENT))
            self._first[token_id] = known
        return known

    def ends_text(self, token_id: int) -> bool:
        """Say whether text that ends with this token is final, except for an incomplete character."""
        known = self._ends_text.get(token_id)
        if known is None:
            known = self._ends_text[token_id] = not self.is_silent(token_id) and not self.is_byte(token_id)
        return known

    def adds_nothing(self, token_id: int) -> bool:
        """Say whether a token's text is empty wherever it stands, not only in front."""
        known = self._adds_nothing.get(token_id)
        if known is None:
            try:
                known = not self.decode([token_id]) and not self.decode([token_id] * _COPIES)
            except TokenizerError:  # it may have a text beside others
                known = False
            self._adds_nothing[token_id] = known
        return known

    def weight(self, token_id: int) -> int:
        """Return what decoding a token takes, in characters."""
        known = self._weights.get(token_id)
        if known is None:
            known = self._weights[token_id] = _TOKEN_WEIGHT + len(self.spelling(token_id))
        return known


class IncrementalDetokenizer:
    """Decodes one sequence. The pieces joined equal `tokenizer.decode` of all its ids exactly.

    `tokenizer` is a `tokenizers.Tokenizer`, one of transformers', or what `decoder_of` makes of one; text is
    never cleaned up (`clean_up_tokenization_spaces`), as that changes text already returned. A piece ends
    where no later token can change it: incomplete UTF-8 waits, and so does a run of byte tokens (`<0xE2>`),
    all of which tokenizers turns into replacement characters if any part is malformed.

    Each step decodes a window that begins with text already returned, so that special treatment of the very
    first token — stripping a space — affects only that. O(1) amortised per token, whatever its text: of
    tokens in a row that add nothing, one is decoded, and silent ones are left out.
    """

    # ids:  [0, read)     context, its text is returned
    #       [read, …)     pending, `returned` characters of the window are returned

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        self._decoder = decoder_of(tokenizer, skip_special_tokens=skip_special_tokens)
        self._ids: list[int] = []
        self._read = 0
        self._num_returned = 0
        self._num_final = 0  # ids whose text is final, except for an incomplete character
        self._is_whole = True  # that text does not end within a character

    def append(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens and return the text that became final, usually but not always theirs."""
        decoder, num_final = self._decoder, self._num_final
        for token_id in map(int, token_ids):
            if decoder.ends_text(token_id):
                if self._ids and decoder.adds_nothing(token_id) and decoder.adds_nothing(self._ids[-1]):
                    continue
                self._ids.append(token_id)
                num_final = len(self._ids)
            elif not decoder.is_silent(token_id):
                self._ids.append(token_id)
        if num_final == self._num_final:
            return ""
        self._num_final = num_final
        text = decoder.decode(self._ids[:num_final])
        certain = text.removesuffix(REPLACEMENT)
        piece = certain[self._num_returned :]
        self._num_returned = max(self._num_returned, len(certain))
        self._is_whole = certain == text
        if self._is_whole and decoder.joins_texts:
            del self._ids[:num_final]
            self._num_final = self._num_returned = 0
        elif (self._is_whole and piece) or self._is_long():
            piece += self._move(text)
        return piece

    def finish(self) -> str:
        """Return the rest; no more tokens will come."""
        piece = self._decoder.decode(self._ids)[self._num_returned :]
        self._num_returned += len(piece)
        return piece

    def _is_long(self) -> bool:
        return sum(map(self._decoder.weight, self._ids[self._read : self._num_final])) > _LONG

    def _move(self, text: str) -> str:
        """Let the last of the pending ids be the context of what follows; `text` is that of the window.

        Wherever a window begins, it resynchronizes with the character boundaries within a few tokens. Up to
        there its count may differ; the difference of the two lengths corrects for that. Returns a final
        replacement character that the context does not end with: no later token completes it.
        """
        border, weight = self._num_final, 0
        while border > self._read and weight < _KEPT:
            border -= 1
            weight += self._decoder.weight(self._ids[border])
        context = self._decoder.decode(self._ids[border : self._num_final])
        if not context and border > self._read:
            border = self._read
            context = self._decoder.decode(self._ids[border : self._num_final])
        if not context and not self._is_long():
            return ""  # from the front of a window without text, more may be stripped
        piece = "" if context.endswith(REPLACEMENT) else text[self._num_returned :]
        self._is_whole |= bool(piece)
        self._num_returned += len(piece) + len(context) - len(text)
        del self._ids[:border]
        self._read = self._num_final = self._num_final - border
        return piece


class TokenwiseDetokenizer(IncrementalDetokenizer):
    """An IncrementalDetokenizer that also says what each token adds. Those texts joined are the text.

    Usually that is known at once. A token that ends within a character waits for the next one, and byte
    tokens for the end of their run.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        super().__init__(tokenizer, skip_special_tokens=skip_special_tokens)
        self._settled: list[Iterable[TokenText]] = []
        self._waiting: list[_Waiting] = []
        self._loose = ""  # returned text that belongs to waiting tokens
        self._run: list[int] = []  # byte tokens at the end of the window
        self._incomplete: bytes | None = b""  # character at the end of that run; None: the run is malformed

    def append(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens and return the text that became final, usually but not always theirs."""
        return "".join([self._append(int(token_id)) for token_id in token_ids])

    def finish(self) -> str:
        """Return the rest; no more tokens will come."""
        piece = super().finish()
        self._loose += piece
        self._settle()
        return piece

    def settled(self) -> Iterator[TokenText]:
        """Yield what tokens add, in order, of which this became known since the last call; to be read whole.

        A run of byte tokens may be long, and is divided while this is read.
        """
        settled, self._settled = self._settled, []
        return chain.from_iterable(settled)

    def instead(self, token_ids: Iterable[int]) -> list[TokenText]:
        """Return what each of these would add as the next token, without a character that it begins.

        Decodes a few tokens for each, however much is pending.
        """
        decoder, known = self._decoder, self._num_returned
        prefix = self._ids[: self._num_final] + self._run[:1]
        if not prefix and decoder.joins_texts:
            return [decoder.first(token_id) for token_id in token_ids]
        pending = decoder.decode(prefix)[known:] if self._waiting else ""
        texts = []
        for token_id in token_ids:
            if not decoder.ends_text(token_id):
                texts.append(self._byte_instead(token_id, is_first=not prefix))
            elif not prefix:
                texts.append(decoder.first(token_id))
            else:
                rest = decoder.decode([*prefix, token_id])[known:]
                piece = rest.removesuffix(REPLACEMENT)
                texts.append(decoder.text_of(token_id, piece[_start(piece, rest, pending) :]))
        return texts

    def _byte_instead(self, token_id: int, *, is_first: bool) -> TokenText:
        """Return what a byte token would add to the run, or a silent token, which adds nothing."""
        if self._decoder.is_silent(token_id):
            return self._decoder.first(token_id)
        if is_first and not self._decoder.decode([token_id]):
            return NO_TEXT  # a space, which is stripped from the front
        text, _ = _add_byte(self._incomplete, self._decoder.raw(token_id))
        return self._decoder.text_of(token_id, text)

    def _append(self, token_id: int) -> str:
        if not self._decoder.ends_text(token_id):
            self._wait(token_id)
            return super().append((token_id,))
        waiting = self._waiting
        pending = self._decoder.decode(self._ids)[self._num_returned :] if waiting else ""
        piece = own = super().append((token_id,))
        if waiting:
            start = _start(piece, piece if self._is_whole else piece + REPLACEMENT, pending)
            self._loose += piece[:start]
            own = piece[start:]
            self._settle()
        if self._is_whole:
            self._settled.append((self._decoder.text_of(token_id, own),))
        else:
            self._waiting.append(_Waiting(token_id))
            self._loose = own
        return piece

    def _wait(self, token_id: int) -> None:
        if not self._decoder.is_silent(token_id):
            text, self._incomplete = _add_byte(self._incomplete, self._decoder.raw(token_id))
            self._run.append(token_id)
            self._waiting.append(_Waiting(token_id, len(text), is_byte=True))
        elif self._waiting:
            self._waiting.append(_Waiting(token_id))
        else:
            self._settled.append((self._decoder.first(token_id),))

    def _settle(self) -> None:
        """Give the loose text to the waiting tokens."""
        is_valid = self._incomplete == b""  # else tokenizers has replaced each byte
        lengths = [each.length if is_valid else int(each.is_byte) for each in self._waiting]
        self._settled.append(self._divided(self._loose, self._waiting, lengths))
        self._waiting, self._loose, self._run, self._incomplete = [], "", [], b""

    def _divided(
        self, loose: str, waiting: Sequence[_Waiting], lengths: Sequence[int]
    ) -> Iterator[TokenText]:
        # Text beyond the tokens' lengths belongs to the first; missing text was stripped from the front.
        end = len(loose) - sum(lengths)
        start = 0
        for each, length in zip(waiting, lengths, strict=True):
            end += length
            text = loose[start : max(start, end)]
            start += len(text)
            if not each.is_byte and self._decoder.is_silent(each.token_id):
                yield self._decoder.first(each.token_id)
            elif len(text) < length:
                yield NO_TEXT
            else:
                yield self._decoder.text_of(each.token_id, text)


class _Waiting(NamedTuple):
    """A token whose text is not known yet."""

    token_id: int
    length: int = 0  # of what it adds to a run of byte tokens, if all of that is valid
    is_byte: bool = False


def _start(piece: str, shown: str, pending: str) -> int:
    """Return where a token's own text begins in a piece.

    `pending` is what the tokens before it would have added at the end of a text. They do add it if `shown`,
    the piece with the character that it ends within, goes on from there; if not, the token completes a
    character of theirs.
    """
    return min(len(pending), len(piece)) if shown.startswith(pending) else 0


def _add_byte(incomplete: bytes | None, byte: bytes | None) -> tuple[str, bytes | None]:
    """Return what a byte adds to the text of a run, and the incomplete character that the run then ends with.

    That is None for a malformed run.
    """
    if incomplete is None or byte is None:
        return REPLACEMENT, None
    try:
        return (incomplete + byte).decode(), b""
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data":
            return "", incomplete + byte
        return REPLACEMENT, None


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
        token = self.spelling(token_id)
        return _BYTE_TOKEN.fullmatch(token) is not None and self.decode([token_id]) != token

    def is_silent(self, token_id: int) -> bool:
        return token_id in self._special or self._tokenizer.id_to_token(token_id) is None

    def spelling(self, token_id: int) -> str:
        return self._tokenizer.id_to_token(token_id) or ""


class _ByteLevelDecoder(_BackendDecoder):
    """A `tokenizers.Tokenizer` whose text is the bytes of its tokens, which are looked up only once."""

    joins_texts = True

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool) -> None:
        super().__init__(tokenizer, skip_special_tokens=skip_special_tokens)
        self._bytes: dict[int, bytes] = {}

    def decode(self, token_ids: list[int]) -> str:
        return b"".join(map(self._bytes_of, token_ids)).decode("utf-8", "replace")

    def is_byte(self, token_id: int) -> bool:
        return False

    def raw(self, token_id: int) -> bytes:
        return self._bytes_of(token_id)

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
        token = self.spelling(token_id)
        return _BYTE_TOKEN.fullmatch(token) is not None and self.decode([token_id]) != token

    def is_silent(self, token_id: int) -> bool:
        return token_id in self._special

    def spelling(self, token_id: int) -> str:
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        return token if isinstance(token, str) else ""


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


class Decoders:
    """The decoders of one tokenizer; without a tokenizer there are none."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._decoders: dict[bool, Decoder] = {}  # by whether they skip special tokens

    def get(self, *, skip_special_tokens: bool) -> Decoder | None:
        """Return a decoder, the same one each time."""
        if self._tokenizer is not None and skip_special_tokens not in self._decoders:
            made = decoder_of(self._tokenizer, skip_special_tokens=skip_special_tokens)
            self._decoders[skip_special_tokens] = made
        return self._decoders.get(skip_special_tokens)
