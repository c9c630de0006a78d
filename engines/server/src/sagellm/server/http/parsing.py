"""Decodes bytes into a body that satisfies the schema, or raises an error that names the parameter.

Bodies, messages and their parts are objects of `body_schema`, read alike: names, sizes and item counts are
checked before a value is decoded, so a refused body takes about as much memory as its bytes.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Raw, Struct

from sagellm.core import TokenIds, nearest
from sagellm.server.http.body import LONG_BODY_BYTES, object_fault
from sagellm.server.http.body_schema import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_PROMPTS,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Message,
    Role,
    StreamOptions,
    TextPart,
    TokenizeBody,
)
from sagellm.server.http.errors import APIError, invalid, unsupported
from sagellm.server.http.ignored_fields import IgnoredFields
from sagellm.server.http.json_values import (
    PromptLimits,
    items,
    read_text,
    read_token_ids,
    too_many_characters,
)
from sagellm.server.http.tools import check_tool_message
from sagellm.server.http.unsupported import (
    IGNORED,
    IGNORED_IN_MESSAGES,
    UNSUPPORTED,
    UNSUPPORTED_IN_MESSAGES,
    UNUSED_IF_NONE,
    Refusal,
    asks_for_nothing,
)

B = TypeVar("B", bound=Struct)

MAX_FIELD_BYTES = 256 << 10
"""Limit on each field except prompts, messages and tokens: 64 stop strings of 1,024 characters fit."""

_MAX_FIELDS = 64  # of a message, or of a part of one
_MAX_NEUTRAL_BYTES = 1 << 10  # longer than any value that requests nothing
_OLD_TOOL_ROLE = b'"function"'
_NULL, _NONE = Raw(b"null"), Raw(b'"none"')
_FIRST_BYTES = {dict: b"{", list: b"[", str: b'"', bool: b"tf"}
_FIRST_ITEM = re.compile(rb"\[\s*(.)", re.DOTALL)
_INDEX = re.compile(r"\[\d+\]")
_WHERE = re.compile(r"(.*?)(?: - at (?:`key` in )?`\$\.?([^`]*)`)?", re.DOTALL)
_PATTERN = re.compile(r"matching regex '.*'")
_TEXTS = ("keys of at most 64 letters, digits and _", "of at most 64 letters, digits, _ and -")
_FORMS = {
    "tools": 'a list of {"type": "function", "function": {"name": …, "parameters": {…}}}',
    "tool_choice": '{"type": "function", "function": {"name": …}}',
}
"""What fields look like in which names are often wrong."""

_NAMES = frozenset(Message.__struct_fields__)
_decode_names = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_optional_names = msgspec.json.Decoder(dict[str, Raw] | None).decode
_decode_texts = msgspec.json.Decoder(str | list[str]).decode
_decode_message = msgspec.json.Decoder(Message).decode
_decode_parts = msgspec.json.Decoder(Annotated[list[TextPart], Meta(max_length=MAX_PARTS)]).decode
_decode_role = msgspec.json.Decoder(Role).decode
_decode_options = msgspec.json.Decoder(StreamOptions | None).decode


@dataclass(frozen=True, slots=True)
class Parsed(Generic[B]):
    """A body that has passed the schema, and the names of its ignored fields."""

    body: B
    ignored: IgnoredFields


async def parse(
    data: bytes | bytearray, kind: type[B], limits: PromptLimits, *, is_lenient: bool = False
) -> Parsed[B]:
    """Check a body and return it. Long ones are read on another thread. Raises APIError."""
    if len(data) > LONG_BODY_BYTES:
        return await asyncio.to_thread(parse_now, data, kind, limits, is_lenient=is_lenient)
    return parse_now(data, kind, limits, is_lenient=is_lenient)


def parse_now(
    data: bytes | bytearray,
    kind: type[B],
    limits: PromptLimits | None = None,
    *,
    is_lenient: bool = False,
) -> Parsed[B]:
    """Check a body and return it. A lenient server ignores unknown fields. Raises APIError."""
    try:
        values = _decode_names(data)
    except msgspec.ValidationError:
        raise APIError(400, "the body must be a JSON object", code="invalid_json") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _explain_json(data) from error
    reading = _Reading(limits or PromptLimits(), IgnoredFields(takes_unknown=is_lenient))
    try:
        return Parsed(reading.read(kind, values, ""), reading.ignored)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # of a text: which one depends on the version
        raise _explain_json(b"") from error


@dataclass(frozen=True, slots=True)
class _Reading:
    """One body that is being read."""

    limits: PromptLimits
    ignored: IgnoredFields

    def read(self, kind: type[B], values: Mapping[str, Raw], prefix: str) -> B:
        """Return an object. The names of its fields are shown after `prefix`.

        A field that is null is absent, unless it is required. Adds the names of ignored fields to `ignored`.
        Raises APIError for any other, unless its value requests nothing, such as null or false.
        """
        known = _KNOWN[kind]
        fields: dict[str, Any] = {}
        others: dict[str, Raw] = {}
        for name, raw in values.items():
            if (reader := known.readers.get(name)) is None:
                others[name] = raw
            elif raw != _NULL or name in known.required:
                shown = prefix + name
                try:
                    fields[name] = reader(memoryview(raw), shown, self)
                except msgspec.ValidationError as error:
                    raise _explain(error, shown, _FORMS.get(name, ""), known.words.get(name, ())) from None
        unused = [name for choice, name in UNUSED_IF_NONE.items() if values.get(choice) == _NONE]
        for name, raw in others.items():
            self._take_other(prefix, name, raw, known, list if name in unused else known.ignored.get(name))
        for name in known.required:
            if name not in fields:
                raise _missing(prefix + name)
        return kind(**fields)

    def _take_other(self, prefix: str, name: str, raw: Raw, known: _Known, kind: type | None) -> None:
        """Ignore a field that is not of the schema, if it is of its `kind`, or refuse it."""
        if kind is not None:
            if raw == _NULL:
                return
            _require_type(prefix + name, memoryview(raw), kind)
        elif not self.ignored.takes_unknown or name in known.refused:
            _require_nothing(f"{prefix}{name[:64]}", name, memoryview(raw), known)
            return
        self.ignored.add(_INDEX.sub("", prefix) + name)

    def object(self, kind: type[B], value: memoryview, shown: str) -> B:
        """Return a message, or a part of one."""
        if len(value) > LONG_BODY_BYTES and (fault := object_fault(value, shown)) is not None:
            raise invalid(shown, fault)
        try:
            values = _decode_names(value)
        except msgspec.ValidationError as error:
            raise _explain(error, shown) from None
        if len(values) > _MAX_FIELDS:
            raise invalid(shown, f"{shown}: {len(values)} fields; there may be at most {_MAX_FIELDS}")
        return self.read(kind, values, f"{shown}.")


_Reader = Callable[[memoryview, str, _Reading], Any]
"""Decodes the JSON of a field, whose name is shown as this. Raises APIError or ValidationError."""


def _first(value: memoryview) -> bytes:
    """Return the first byte of a JSON value, which determines its type."""
    return bytes(value[:1])


def _read_messages(value: memoryview, shown: str, reading: _Reading) -> list[Message]:
    if _first(value) != b"[":
        msgspec.json.decode(value, type=list)  # raises ValidationError
    messages: list[Message] = []
    called: set[str] = set()  # ids of tool calls so far
    num_characters = 0
    for index, item in enumerate(items(value)):
        if index == MAX_MESSAGES:
            raise invalid(shown, f"{shown}: there may be at most {MAX_MESSAGES}; send fewer")
        where = f"{shown}[{index}]"
        message = _read_plain(item) or reading.object(Message, item, where)
        if message.content is None and message.role != "assistant":
            raise _missing(f"{where}.content")
        if message.tool_calls or message.tool_call_id is not None or message.role == "tool":
            check_tool_message(message, where, called)
        if isinstance(message.content, list):  # thousands of parts are joined only once
            message = msgspec.structs.replace(message, content=message.text)
        messages.append(message)
        num_characters += message.num_characters
        if num_characters > reading.limits.num_characters:
            raise too_many_characters(shown, reading.limits)
    if not messages:
        raise invalid(shown, f"{shown}: expected at least one")
    return messages


def _read_plain(value: memoryview) -> Message | None:
    """Decode a message at once, ten times as fast; None if it is long, invalid, or has ignored fields."""
    if len(value) <= MAX_FIELD_BYTES:
        with suppress(msgspec.ValidationError):
            if _NAMES.issuperset(_decode_names(value)):
                return _decode_message(value)
    return None


def _read_role(value: memoryview, shown: str, reading: _Reading) -> str:
    if value == _OLD_TOOL_ROLE:
        raise unsupported(
            shown,
            "functions are given as tools",
            remedy="send a result in the role 'tool', with its call's id",
        )
    role: str = _decode_role(value)
    return role


def _read_content(value: memoryview, shown: str, reading: _Reading) -> str | list[TextPart]:
    if _first(value) == b'"':
        return read_text(value, shown, reading.limits)
    if _first(value) != b"[":
        msgspec.json.decode(value, type=str | list | None)  # raises ValidationError
    if len(value) <= MAX_FIELD_BYTES:
        with suppress(msgspec.ValidationError):  # what follows gives the precise error
            decoded: list[TextPart] = _decode_parts(value)
            return decoded
    parts = []
    for number, item in enumerate(items(value)):
        if number == MAX_PARTS:
            raise invalid(shown, f"{shown}: there may be at most {MAX_PARTS} parts; send fewer")
        parts.append(reading.object(TextPart, item, f"{shown}[{number}]"))
    return parts


def _read_type(value: memoryview, shown: str, reading: _Reading) -> str:
    if _first(value) == b'"' and bytes(value[:7]) != b'"text"':
        raise unsupported(shown, "the models here read text", remedy="send parts of the type 'text' alone")
    text: str = msgspec.json.decode(value, type=str)
    return text


def _read_text(value: memoryview, shown: str, reading: _Reading) -> str:
    return read_text(value, shown, reading.limits)


def _read_prompt(value: memoryview, shown: str, reading: _Reading) -> str | list[str] | list[TokenIds]:
    limits = reading.limits
    if _first(value) == b'"':
        return read_text(value, shown, limits)
    found = _FIRST_ITEM.match(value)
    if found is not None and found[1] in b"-0123456789":
        return [read_token_ids(value, shown, limits)]
    is_short = len(value) <= LONG_BODY_BYTES and found is not None and found[1] == b'"'
    if found is None or found[1] not in b'["' or is_short:
        decoded: str | list[str] = _decode_texts(value)
        if len(decoded) > MAX_PROMPTS:
            raise _too_many_prompts(shown)
        return decoded
    texts: list[str] = []
    lists: list[TokenIds] = []
    num_characters = 0
    for number, item in enumerate(items(value)):
        if number == MAX_PROMPTS:
            raise _too_many_prompts(shown)
        if found[1] == b"[":
            lists.append(read_token_ids(item, shown, limits))
            continue
        texts.append(read_text(item, shown, limits))
        num_characters += len(texts[-1])
        if num_characters > limits.num_characters:
            raise too_many_characters(shown, limits)
    return texts or lists


def _too_many_prompts(shown: str) -> APIError:
    return invalid(shown, f"{shown}: there may be at most {MAX_PROMPTS} prompts; send fewer")


def _read_tokens(value: memoryview, shown: str, reading: _Reading) -> TokenIds:
    return read_token_ids(value, shown, PromptLimits(num_tokens=reading.limits.num_characters))


def _read_options(value: memoryview, shown: str, reading: _Reading) -> StreamOptions | None:
    """Return the supported stream options; others are ignored, as none changes the text."""
    _check_size(shown, value)
    for name in _decode_optional_names(value) or ():
        if name not in StreamOptions.__struct_fields__:
            reading.ignored.add(f"{shown}.{name[:64]}")
    options: StreamOptions | None = _decode_options(value)
    return options


def _read_any(decode: Callable[[memoryview], Any]) -> _Reader:
    def read(value: memoryview, shown: str, reading: _Reading) -> Any:
        _check_size(shown, value)
        return decode(value)

    return read


def _check_size(shown: str, value: memoryview) -> None:
    if len(value) > MAX_FIELD_BYTES:
        raise invalid(
            shown, f"{shown}: {len(value)} bytes; there may be at most {MAX_FIELD_BYTES}; send less"
        )


@dataclass(frozen=True, slots=True)
class _Known:
    """The names that an object may have: its fields, and those that are ignored or refused."""

    readers: Mapping[str, _Reader]
    required: tuple[str, ...]
    ignored: Mapping[str, type]
    refused: Mapping[str, Refusal]
    words: Mapping[str, tuple[str, ...]]  # what fields with few values may be


def _known(
    kind: type[Struct],
    special: Mapping[str, _Reader],
    ignored: Mapping[str, type] = IGNORED,
    refused: Mapping[str, Refusal] = UNSUPPORTED,
) -> _Known:
    hints = get_type_hints(kind, include_extras=True)
    readers = {
        name: special[name] if name in special else _read_any(msgspec.json.Decoder(hint).decode)
        for name, hint in hints.items()
    }
    required = tuple(field.name for field in msgspec.structs.fields(kind) if field.required)
    words = {name: found for name, hint in hints.items() if (found := _words(hint))}
    return _Known(readers, required, ignored, refused, words)


def _words(hint: Any) -> tuple[str, ...]:
    """Return the texts that a type lists, none for most types."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    return tuple(word for part in get_args(hint) for word in _words(part))


_KNOWN: Mapping[type[Struct], _Known] = {
    CompletionBody: _known(CompletionBody, {"prompt": _read_prompt, "stream_options": _read_options}),
    ChatBody: _known(ChatBody, {"messages": _read_messages, "stream_options": _read_options}),
    TokenizeBody: _known(TokenizeBody, {"prompt": _read_text, "messages": _read_messages}),
    DetokenizeBody: _known(DetokenizeBody, {"tokens": _read_tokens}),
    Message: _known(
        Message, {"role": _read_role, "content": _read_content}, IGNORED_IN_MESSAGES, UNSUPPORTED_IN_MESSAGES
    ),
    TextPart: _known(TextPart, {"type": _read_type, "text": _read_text}, {}, {}),
}


def _require_type(shown: str, value: memoryview, kind: type) -> None:
    """Check only the type: an ignored value may be long."""
    if _first(value) in _FIRST_BYTES[kind]:
        return
    try:
        msgspec.json.decode(value, type=kind)  # refuses a wrong type at its first byte
    except msgspec.ValidationError as error:
        raise _explain(error, shown) from None


def _require_nothing(shown: str, name: str, value: memoryview, known: _Known) -> None:
    refusal = known.refused.get(name)
    if refusal is None:
        near = nearest(name[:64], [*known.readers, *known.ignored, *known.refused])
        told = f"unknown parameter {shown!r}.{near} A server started with --lenient ignores unknown ones."
        raise invalid(shown, told, code="unknown_parameter")
    if len(value) > _MAX_NEUTRAL_BYTES or not asks_for_nothing(refusal, _decode_short(value)):
        raise unsupported(shown, refusal.why)


def _decode_short(value: memoryview) -> Any:
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return value


def _explain(
    error: msgspec.ValidationError, name: str, form: str = "", words: tuple[str, ...] = ()
) -> APIError:
    """Return the error for an invalid value of a field, with the path within it, and what there may be.

    That is its `form`, unless it is clear from a type, and one of these `words` if it is another.
    """
    found = _WHERE.fullmatch(str(error))
    what, path = (found[1], found[2] or "") if found else (str(error), "")
    where = name + ("." if path and not path.startswith("[") else "") + path
    where = where.removesuffix("[...]")
    what = _PATTERN.sub(lambda text: _TEXTS["_-]" in text[0]], what)
    if what.startswith("Invalid enum value") and words and not path:
        what = f"{what}; it must be one of {', '.join(words)}{form and ', or '}{form}"
    elif form and what.startswith(("Invalid enum", "Object")):
        what = f"{what}; {name} must be {form}"
    return invalid(where, f"{where}: {what[:1].lower()}{what[1:]}")


def _missing(name: str) -> APIError:
    return invalid(name, f"the parameter {name!r} is missing", code="missing_parameter")


def _explain_json(data: bytes | bytearray) -> APIError:
    """Return the error for invalid JSON, which names the parameter whose number is out of range, if any."""
    try:
        values = json.loads(data, parse_int=_bounded) if len(data) <= LONG_BODY_BYTES else None
    except (ValueError, RecursionError):
        values = None
    if isinstance(values, dict):
        for name, value in values.items():
            numbers = value.values() if isinstance(value, dict) else (value,)
            if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
                return invalid(name[:64], f"{name[:64]}: the number is out of range")
    return APIError(400, "the body is not valid JSON in UTF-8", code="invalid_json")


def _bounded(digits: str) -> int | float:
    return int(digits) if len(digits) < 24 else math.inf
