"""Decodes the messages of a chat, one by one."""

from __future__ import annotations

from typing import Annotated, Any, get_type_hints

import msgspec
from msgspec import Meta, Raw

from sagellm.engines.server.errors import invalid, unsupported
from sagellm.engines.server.json_fields import (
    Known,
    decode_field,
    decode_object,
    first_byte,
    is_json,
    is_null,
    missing,
    read_names,
)
from sagellm.engines.server.long_values import PromptLimits, check_text, items, too_many_characters
from sagellm.engines.server.schema import MAX_MESSAGES, MAX_PARTS, Message, TextPart
from sagellm.engines.server.unsupported import IGNORED_IN_MESSAGES, UNSUPPORTED_IN_MESSAGES

_KNOWN = Known(Message.__struct_fields__, IGNORED_IN_MESSAGES, UNSUPPORTED_IN_MESSAGES)
_TOOL_ROLES = (b'"tool"', b'"function"')
_DECODERS = {
    name: msgspec.json.Decoder(hint).decode
    for name, hint in get_type_hints(Message, include_extras=True).items()
}
_MAX_PLAIN_BYTES = 256 << 10
_NAMES = frozenset(Message.__struct_fields__)
_decode_names_of_all = msgspec.json.Decoder(list[dict[str, Raw]]).decode
_decode_all = msgspec.json.Decoder(
    Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
).decode
_decode_text = msgspec.json.Decoder(str).decode
_PART = Known(TextPart.__struct_fields__, {}, {})


def read_messages(
    value: memoryview, limits: PromptLimits, ignored: dict[str, None], *, is_optional: bool
) -> list[Message] | None:
    """Return messages; the names of ignored fields are added to `ignored`. Raises APIError."""
    if is_optional and is_null(value):
        return None
    if first_byte(value) != b"[":
        msgspec.json.decode(value, type=list)  # raises ValidationError
    plain = _read_plain(value) if len(value) <= _MAX_PLAIN_BYTES else None
    if plain is not None and sum(len(message.text) for message in plain) <= limits.num_characters:
        return plain
    messages: list[Message] = []
    num_characters = 0
    for index, item in enumerate(items(value)):
        if index == MAX_MESSAGES:
            raise invalid("messages", f"messages: there may be at most {MAX_MESSAGES}; send fewer")
        messages.append(_read_message(f"messages[{index}]", item, limits, ignored))
        num_characters += len(messages[-1].text)
        if num_characters > limits.num_characters:
            raise too_many_characters("messages", limits)
    if not messages:
        raise invalid("messages", "messages: expected at least one")
    return messages


def _read_plain(value: memoryview) -> list[Message] | None:
    """Decode messages that have only known fields at once, ten times as fast; None if there are others."""
    try:
        if all(_NAMES.issuperset(names) for names in _decode_names_of_all(value)):
            messages: list[Message] = _decode_all(value)
            return messages
    except msgspec.ValidationError:
        pass
    return None


def _read_message(where: str, value: memoryview, limits: PromptLimits, ignored: dict[str, None]) -> Message:
    values = decode_object(value, where)
    role = memoryview(values.get("role", b""))
    if any(is_json(role, name) for name in _TOOL_ROLES):
        raise unsupported(f"{where}.role", "this server has no tool parser")
    content = memoryview(values.get("content", b""))
    parts = _read_parts(f"{where}.content", content, limits) if first_byte(content) == b"[" else None
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


def _read_parts(where: str, value: memoryview, limits: PromptLimits) -> list[TextPart]:
    parts = []
    for number, item in enumerate(items(value)):
        if number == MAX_PARTS:
            raise invalid(where, f"{where}: there may be at most {MAX_PARTS} parts; send fewer")
        parts.append(_read_part(f"{where}[{number}]", item, limits))
    return parts


def _read_part(where: str, value: memoryview, limits: PromptLimits) -> TextPart:
    values = decode_object(value, where)
    kind = memoryview(values.get("type", b""))
    if first_byte(kind) == b'"' and not is_json(kind, b'"text"'):
        raise unsupported(f"{where}.type", "the models here read and write text")
    fields = read_names(values, _PART, f"{where}.", {})
    for name in _PART.fields:
        if name not in fields:
            raise missing(f"{where}.{name}")
    check_text(memoryview(fields["text"]), f"{where}.text", limits)
    decode_field(fields["type"], _decode_text, f"{where}.type")
    return TextPart(type="text", text=decode_field(fields["text"], _decode_text, f"{where}.text"))
