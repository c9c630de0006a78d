"""Reads the JSON of a body in pieces: objects field by field, long values item by item.

A list that is too long is never decoded whole: decoded, a list of short texts takes thirty times its bytes.
All functions take syntactically valid JSON.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from msgspec import Raw

from sagellm.core import TokenIds, nearest, pack
from sagellm.server.http.body import BRACKET_STEPS, LONG_BODY_BYTES, MAX_BODY_BYTES, TO_BRACKET, object_fault
from sagellm.server.http.body_schema import TokenId
from sagellm.server.http.errors import APIError, invalid, unsupported
from sagellm.server.http.ignored_fields import IgnoredFields
from sagellm.server.http.unsupported import Refusal, asks_for_nothing

T = TypeVar("T")

_decode_names = msgspec.json.Decoder(dict[str, Raw]).decode
_MAX_NEUTRAL_BYTES = 1 << 10
_MAX_FIELDS = 64  # of a message, or of a part of one
_INDEX = re.compile(r"\[\d+\]")
_FIRST_BYTES = {dict: b"{", list: b"[", str: b'"', bool: b"tf"}
_WHERE = re.compile(r"(.*?)(?: - at (?:`key` in )?`\$\.?([^`]*)`)?", re.DOTALL)
_PATTERN = re.compile(r"matching regex '.*'")
_SLICE_BYTES = 32 << 10
_TO_COMMA = re.compile(rb'(?:[^"\[\]{},]++|"(?:[^"\\]++|\\.)*+")*+([\[\]{},])', re.DOTALL)
_COMMA = re.compile(rb",")
_OPEN = re.compile(rb"\s*\[")
_CLOSE = re.compile(rb"\]")
_EMPTY = re.compile(rb"\[\s*\]")
_CONTINUATION = bytes(range(0x80, 0xC0))  # UTF-8 continuation bytes
_decode_ids = msgspec.json.Decoder(list[TokenId]).decode
_decode_text = msgspec.json.Decoder(str).decode


@dataclass(frozen=True, slots=True)
class Known:
    """The names that an object may have: its fields, and those that are ignored or refused."""

    fields: tuple[str, ...]
    ignored: Mapping[str, type]
    refused: Mapping[str, Refusal]


def decode_object(value: memoryview, name: str) -> dict[str, Raw]:
    """Return the JSON of each field of an object. Raises APIError."""
    if len(value) > LONG_BODY_BYTES and (fault := object_fault(value, name)) is not None:
        raise invalid(name, fault)
    return decode_field(value, _decode_names, name)


def decode_field(value: memoryview | Raw, decode: Callable[[memoryview | Raw], T], name: str) -> T:
    """Decode the value of a field. Raises APIError."""
    try:
        return decode(value)
    except msgspec.ValidationError as error:
        raise explain(error, name) from None


def read_names(
    values: Mapping[str, Raw], known: Known, prefix: str, ignored: IgnoredFields
) -> dict[str, Raw]:
    """Return the known fields and add ignored ones to `ignored`.

    Raises APIError for any other, unless its value requests nothing, such as null or false, and for more than
    64 fields in an object inside the body.
    """
    if prefix and len(values) > _MAX_FIELDS:
        shown = prefix.removesuffix(".")
        raise invalid(shown, f"{shown}: {len(values)} fields; there may be at most {_MAX_FIELDS}")
    fields = {}
    for name, raw in values.items():
        if name in known.fields:
            fields[name] = raw
            continue
        value = memoryview(raw)
        if name in known.ignored:
            if not is_null(value):
                _require_type(f"{prefix}{name}", value, known.ignored[name])
                ignored.add(_INDEX.sub("", prefix) + name)
        elif ignored.takes_unknown and name not in known.refused:
            ignored.add(_INDEX.sub("", prefix) + name)
        else:
            _require_nothing(f"{prefix}{name[:64]}", name, value, known)
    return fields


def is_null(value: memoryview) -> bool:
    """Say whether a JSON value is null."""
    return is_json(value, b"null")


def is_json(value: memoryview, text: bytes) -> bool:
    """Say whether a JSON value is exactly this text."""
    return len(value) == len(text) and bytes(value) == text


def first_byte(value: memoryview) -> bytes:
    """Return the first byte of a JSON value, which determines its type."""
    return bytes(value[:1])


def explain(error: msgspec.ValidationError, name: str) -> APIError:
    """Return the error for an invalid value of a field, with the path within it."""
    found = _WHERE.fullmatch(str(error))
    what, path = (found[1], found[2] or "") if found else (str(error), "")
    where = name + ("." if path and not path.startswith("[") else "") + path
    where = where.removesuffix("[...]")
    what = _PATTERN.sub("keys of at most 64 letters, digits and _", what)
    return invalid(where, f"{where}: {what[:1].lower()}{what[1:]}")


def missing(name: str) -> APIError:
    """Return the error for a missing required field."""
    return invalid(name, f"the parameter {name!r} is missing", code="missing_parameter")


def _require_type(shown: str, value: memoryview, kind: type) -> None:
    """Check only the type: an ignored value may be long."""
    if first_byte(value) in _FIRST_BYTES[kind]:
        return
    try:
        msgspec.json.decode(value, type=kind)  # refuses a wrong type at its first byte
    except msgspec.ValidationError as error:
        raise explain(error, shown) from None


def _require_nothing(shown: str, name: str, value: memoryview, known: Known) -> None:
    refusal = known.refused.get(name)
    if refusal is None:
        near = nearest(name[:64], [*known.fields, *known.ignored, *known.refused])
        told = f"unknown parameter {shown!r}.{near} A server started with --lenient ignores unknown ones."
        raise invalid(shown, told, code="unknown_parameter")
    is_long = len(value) > _MAX_NEUTRAL_BYTES  # longer than any value that requests nothing
    if is_long or not asks_for_nothing(refusal, _decode_short(value)):
        raise unsupported(shown, refusal.why)


def _decode_short(value: memoryview) -> Any:
    try:
        return msgspec.json.decode(value)
    except UnicodeDecodeError:
        return value


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
    """Return a text. Raises APIError for one that is too long, or ValidationError if it is not a text."""
    check_text(value, name, limits)
    return _decode_text(value)


def check_text(value: memoryview, name: str, limits: PromptLimits) -> None:
    """Raise APIError for a text that is certainly too long.

    A single wide character makes Python use four bytes for every character of a text.
    """
    if len(value) > LONG_BODY_BYTES and _min_characters(value) > limits.num_characters:
        raise too_many_characters(name, limits)


def too_many_characters(name: str, limits: PromptLimits) -> APIError:
    """Return the error for texts that together are too long."""
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
