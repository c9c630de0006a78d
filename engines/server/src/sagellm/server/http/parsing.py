"""Decodes bytes into a body that satisfies the schema, or raises an error that names the parameter.

Names, sizes and item counts are checked before a value is decoded, so a refused body takes about as much
memory as its bytes.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Generic, TypeVar, get_type_hints

import msgspec
from msgspec import Meta, Raw, Struct

from sagellm.core import TokenIds
from sagellm.server.http.body import LONG_BODY_BYTES
from sagellm.server.http.body_schema import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_PROMPTS,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Message,
    StreamOptions,
    TextPart,
    TokenizeBody,
)
from sagellm.server.http.errors import APIError, invalid, unsupported
from sagellm.server.http.ignored_fields import IgnoredFields
from sagellm.server.http.json_values import (
    Known,
    PromptLimits,
    check_text,
    decode_field,
    decode_object,
    explain,
    first_byte,
    is_json,
    is_null,
    items,
    missing,
    read_names,
    read_text,
    read_token_ids,
    too_many_characters,
)
from sagellm.server.http.unsupported import (
    IGNORED,
    IGNORED_IN_MESSAGES,
    UNSUPPORTED,
    UNSUPPORTED_IN_MESSAGES,
    UNUSED_IF_NONE,
)

_KNOWN = Known(Message.__struct_fields__, IGNORED_IN_MESSAGES, UNSUPPORTED_IN_MESSAGES)
_TOOL_ROLES = (b'"tool"', b'"function"')
_NONE = Raw(b'"none"')
_DECODERS = {
    name: msgspec.json.Decoder(hint).decode
    for name, hint in get_type_hints(Message, include_extras=True).items()
}
_MAX_PLAIN_BYTES = 256 << 10
_NAMES = frozenset(Message.__struct_fields__)
_decode_message = msgspec.json.Decoder(Message).decode
_decode_parts = msgspec.json.Decoder(Annotated[list[TextPart], Meta(max_length=MAX_PARTS)]).decode
_decode_text = msgspec.json.Decoder(str).decode
_PART = Known(TextPart.__struct_fields__, {}, {})
B = TypeVar("B", bound=Struct)

Reader = Callable[[memoryview, PromptLimits, IgnoredFields], Any]
"""Decodes the JSON of a field and adds the names of ignored ones inside it."""

MAX_FIELD_BYTES = 256 << 10
"""Limit on each field except prompts, messages and tokens: 64 stop strings of 1,024 characters fit."""

_decode = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_names = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_optional_names = msgspec.json.Decoder(dict[str, Raw] | None).decode
_decode_options = msgspec.json.Decoder(StreamOptions | None).decode
_decode_texts = msgspec.json.Decoder(str | list[str]).decode
_FIRST = re.compile(rb"\[\s*(.)", re.DOTALL)


def read_messages(
    value: memoryview, limits: PromptLimits, ignored: IgnoredFields, *, is_optional: bool
) -> list[Message] | None:
    """Return messages; the names of ignored fields are added to `ignored`. Raises APIError."""
    if is_optional and is_null(value):
        return None
    if first_byte(value) != b"[":
        msgspec.json.decode(value, type=list)  # raises ValidationError
    messages: list[Message] = []
    num_characters = 0
    for index, item in enumerate(items(value)):
        if index == MAX_MESSAGES:
            raise invalid("messages", f"messages: there may be at most {MAX_MESSAGES}; send fewer")
        message = _read_plain(item) or _read_message(f"messages[{index}]", item, limits, ignored)
        if message.content is None and message.role != "assistant":
            raise missing(f"messages[{index}].content")
        if isinstance(message.content, list):  # thousands of parts are joined only once
            message = msgspec.structs.replace(message, content=message.text)
        messages.append(message)
        num_characters += len(message.text)
        if num_characters > limits.num_characters:
            raise too_many_characters("messages", limits)
    if not messages:
        raise invalid("messages", "messages: expected at least one")
    return messages


def _read_plain(value: memoryview) -> Message | None:
    """Decode a message at once, ten times as fast; None if it is long, invalid, or has ignored fields."""
    if len(value) > _MAX_PLAIN_BYTES:
        return None
    with suppress(msgspec.ValidationError):
        if _NAMES.issuperset(_decode_names(value)):
            return _decode_message(value)
    return None


def _read_message(where: str, value: memoryview, limits: PromptLimits, ignored: IgnoredFields) -> Message:
    values = decode_object(value, where)
    role = memoryview(values.get("role", b""))
    if any(is_json(role, name) for name in _TOOL_ROLES):
        raise unsupported(
            f"{where}.role",
            "this server has no tool parser",
            remedy="send a tool's result as text of the user",
        )
    content = memoryview(values.get("content", b""))
    is_list = first_byte(content) == b"["
    parts = _read_parts(f"{where}.content", content, limits, ignored) if is_list else None
    fields: dict[str, Any] = {}
    for name, raw in read_names(values, _KNOWN, f"{where}.", ignored).items():
        shown = f"{where}.{name}"
        if name == "content" and parts is not None:
            fields[name] = parts
            continue
        check_text(memoryview(raw), shown, limits)
        fields[name] = decode_field(raw, _DECODERS[name], shown)
    if "role" not in fields:
        raise missing(f"{where}.role")
    return Message(**fields)


def _read_parts(
    where: str, value: memoryview, limits: PromptLimits, ignored: IgnoredFields
) -> list[TextPart]:
    if len(value) <= _MAX_PLAIN_BYTES:
        with suppress(msgspec.ValidationError):  # the slow path below gives the precise error
            parts: list[TextPart] = _decode_parts(value)
            return parts
    parts = []
    for number, item in enumerate(items(value)):
        if number == MAX_PARTS:
            raise invalid(where, f"{where}: there may be at most {MAX_PARTS} parts; send fewer")
        parts.append(_read_part(f"{where}[{number}]", item, limits, ignored))
    return parts


def _read_part(where: str, value: memoryview, limits: PromptLimits, ignored: IgnoredFields) -> TextPart:
    values = decode_object(value, where)
    kind = memoryview(values.get("type", b""))
    if first_byte(kind) == b'"' and not is_json(kind, b'"text"'):
        raise unsupported(
            f"{where}.type", "the models here read text", remedy="send parts of the type 'text' alone"
        )
    fields = read_names(values, _PART, f"{where}.", ignored)
    for name in _PART.fields:
        if name not in fields:
            raise missing(f"{where}.{name}")
    check_text(memoryview(fields["text"]), f"{where}.text", limits)
    decode_field(fields["type"], _decode_text, f"{where}.type")
    return TextPart(type="text", text=decode_field(fields["text"], _decode_text, f"{where}.text"))


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
        values = _decode(data)
    except msgspec.ValidationError:
        raise APIError(400, "the body must be a JSON object", code="invalid_json") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _explain_json(data) from error
    ignored = IgnoredFields(takes_unknown=is_lenient)
    readers = _READERS[kind]
    unused = {name: list for choice, name in UNUSED_IF_NONE.items() if values.get(choice) == _NONE}
    known = Known(kind.__struct_fields__, {**IGNORED, **unused}, UNSUPPORTED)
    given = read_names(values, known, "", ignored)
    fields = {}
    for name, value in given.items():
        try:
            fields[name] = readers[name](memoryview(value), limits or PromptLimits(), ignored)
        except msgspec.ValidationError as error:
            raise explain(error, name) from None
        except UnicodeDecodeError as error:
            raise _explain_json(b"") from error
    for name in _REQUIRED[kind]:
        if name not in fields:
            raise missing(name)
    return Parsed(kind(**fields), ignored)


def _read_field(name: str, decode: Callable[[memoryview], Any]) -> Reader:
    def read(value: memoryview, limits: PromptLimits, ignored: IgnoredFields) -> Any:
        _check_size(name, value)
        return decode(value)

    return read


def _check_size(name: str, value: memoryview) -> None:
    if len(value) > MAX_FIELD_BYTES:
        raise invalid(name, f"{name}: {len(value)} bytes; there may be at most {MAX_FIELD_BYTES}; send less")


def _read_prompt(
    value: memoryview, limits: PromptLimits, ignored: IgnoredFields
) -> str | list[str] | list[TokenIds]:
    if first_byte(value) == b'"':
        return read_text(value, "prompt", limits)
    found = _FIRST.match(value)
    if found is not None and found[1] in b"-0123456789":
        return [read_token_ids(value, "prompt", limits)]
    is_short = len(value) <= LONG_BODY_BYTES and found is not None and found[1] == b'"'
    if found is None or found[1] not in b'["' or is_short:
        decoded: str | list[str] = _decode_texts(value)
        if len(decoded) > MAX_PROMPTS:
            raise _too_many_prompts()
        return decoded
    texts: list[str] = []
    lists: list[TokenIds] = []
    num_characters = 0
    for number, item in enumerate(items(value)):
        if number == MAX_PROMPTS:
            raise _too_many_prompts()
        if found[1] == b"[":
            lists.append(read_token_ids(item, "prompt", limits))
            continue
        texts.append(read_text(item, "prompt", limits))
        num_characters += len(texts[-1])
        if num_characters > limits.num_characters:
            raise too_many_characters("prompt", limits)
    return texts or lists


def _too_many_prompts() -> APIError:
    return invalid("prompt", f"prompt: there may be at most {MAX_PROMPTS} prompts; send fewer")


def _read_text_prompt(value: memoryview, limits: PromptLimits, ignored: IgnoredFields) -> str | None:
    return None if is_null(value) else read_text(value, "prompt", limits)


def _read_tokens(value: memoryview, limits: PromptLimits, ignored: IgnoredFields) -> TokenIds:
    return read_token_ids(value, "tokens", PromptLimits(num_tokens=limits.num_characters))


def _read_options(value: memoryview, limits: PromptLimits, ignored: IgnoredFields) -> StreamOptions | None:
    """Return the supported stream options; others are ignored, as none changes the text."""
    _check_size("stream_options", value)
    known = StreamOptions.__struct_fields__
    names = _decode_optional_names(value) or ()
    for name in names:
        if name not in known:
            ignored.add(f"stream_options.{name[:64]}")
    options: StreamOptions | None = _decode_options(value)
    return options


def _readers(kind: type[Struct]) -> dict[str, Reader]:
    hints = get_type_hints(kind, include_extras=True)
    special = {
        "messages": partial(read_messages, is_optional=kind is TokenizeBody),
        "prompt": _read_prompt if kind is CompletionBody else _read_text_prompt,
        "stream_options": _read_options,
        "tokens": _read_tokens,
    }
    return {
        name: special[name] if name in special else _read_field(name, msgspec.json.Decoder(hint).decode)
        for name, hint in hints.items()
    }


_KINDS: tuple[type[Struct], ...] = (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody)
_READERS: Mapping[type[Struct], Mapping[str, Reader]] = {kind: _readers(kind) for kind in _KINDS}
_REQUIRED = {
    kind: [field.name for field in msgspec.structs.fields(kind) if field.required] for kind in _KINDS
}


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
