"""Reads long JSON values in pieces: lists item by item, token ids packed, texts only if they may fit.

A list that is too long is never decoded whole: decoded, a list of short texts takes seventeen times its bytes
(docs/decisions/0027-request-bodies.md). All functions take syntactically valid JSON.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from sagellm.core import TokenIds, pack
from sagellm.server.http.body import BRACKET_STEPS, LONG_BODY_BYTES, MAX_BODY_BYTES, TO_BRACKET
from sagellm.server.http.body_schema import TokenId
from sagellm.server.http.errors import APIError, invalid

_SLICE_BYTES = 32 << 10
_TO_COMMA = re.compile(rb'(?:[^"\[\]{},]++|"(?:[^"\\]++|\\.)*+")*+([\[\]{},])', re.DOTALL)
_COMMA = re.compile(rb",")
_OPEN = re.compile(rb"\s*\[")
_CLOSE = re.compile(rb"\]")
_EMPTY = re.compile(rb"\[\s*\]")
_CONTINUATION = bytes(range(0x80, 0xC0))  # UTF-8 continuation bytes
_decode_ids = msgspec.json.Decoder(list[TokenId]).decode
_decode_text = msgspec.json.Decoder(str).decode


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptLimits:
    """Sizes above which a prompt is refused before it is decoded, as it cannot fit into the context."""

    num_characters: int = MAX_BODY_BYTES
    num_tokens: int = MAX_BODY_BYTES


def items(values: memoryview) -> Iterator[memoryview]:
    """Yield the JSON of each item of a list, lazily, in linear time."""
    if _EMPTY.fullmatch(values):
        return
    depth = start = position = 1
    while depth:
        found = (_TO_COMMA if depth == 1 else TO_BRACKET).match(values, position)
        assert found is not None, "the syntax of the list has been checked"
        position = found.end()
        depth += BRACKET_STEPS.get(found[1], 0)
        if found[1] == b"," or not depth:
            yield values[start : found.start(1)]
            start = position


def read_token_ids(values: memoryview, name: str, limits: PromptLimits) -> TokenIds:
    """Return a list of token ids, packed. Raises APIError, or ValidationError for an invalid token id."""
    opened, closed = _OPEN.match(values), _CLOSE.search(values)
    if opened is None or closed is None:
        raise invalid(name, f"{name}: expected a list of token ids")
    parts: list[bytes] = []
    num_tokens, position, end = 0, opened.end(), closed.start()
    while True:
        comma = _COMMA.search(values, position + _SLICE_BYTES, end)
        part = _packed(values[position : comma.start() if comma else end], name, is_first=not parts)
        parts.append(part.data)
        if comma is None:
            return TokenIds(b"".join(parts))
        num_tokens += len(part)
        if num_tokens > limits.num_tokens:
            raise invalid(
                name,
                f"{name}: there may be at most {limits.num_tokens} tokens in a list; send fewer",
                code="context_length_exceeded",
            )
        position = comma.end()


def _packed(ids: memoryview, name: str, *, is_first: bool) -> TokenIds:
    try:
        return pack(_decode_ids(b"".join((b"[", ids, b"]"))))
    except msgspec.DecodeError as error:
        if is_first and isinstance(error, msgspec.ValidationError):
            raise  # it names the item
        # If it is not a list of numbers, the cut may have split an item.
        raise invalid(name, f"{name}: expected a list of token ids") from None


def read_text(value: memoryview, name: str, limits: PromptLimits) -> str:
    """Return a text. Raises APIError for one that is too long, or ValidationError if it is not a text.

    A long one is measured first: one wide character makes Python use four bytes for each character.
    """
    if len(value) > LONG_BODY_BYTES and _min_characters(value) > limits.num_characters:
        raise too_many_characters(name, limits)
    return _decode_text(value)


def too_many_characters(name: str, limits: PromptLimits) -> APIError:
    """Return the error for texts that, alone or together, are too long."""
    return invalid(
        name,
        f"{name}: there may be at most {limits.num_characters} characters; shorten it",
        code="context_length_exceeded",
    )


def _min_characters(text: memoryview) -> int:
    """Return a lower bound of the characters of a JSON text, exact if it has no escapes."""
    num_characters = -2  # quotes
    for start in range(0, len(text), LONG_BODY_BYTES):
        part = bytes(text[start : start + LONG_BODY_BYTES])
        num_escapes, num_codes = part.count(b"\\"), part.count(b"\\u")
        num_characters += len(part.translate(None, _CONTINUATION)) - num_escapes - 5 * num_codes
        num_characters -= 5 if part.endswith(b"\\") else 0  # the code may be in the next part
    return num_characters
