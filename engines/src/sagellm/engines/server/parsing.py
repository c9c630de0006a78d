"""From bytes to a body that has passed the schema, or an error that names the parameter."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Struct

from sagellm.core import nearest
from sagellm.engines.server.body import LONG_BODY_BYTES
from sagellm.engines.server.errors import APIError, invalid, unsupported
from sagellm.engines.server.schema import Message, StreamOptions
from sagellm.engines.server.unsupported import (
    IGNORED,
    IGNORED_IN_MESSAGES,
    UNSUPPORTED,
    UNSUPPORTED_IN_MESSAGES,
    Refusal,
    asks_for_nothing,
)

B = TypeVar("B", bound=Struct)

_decode = msgspec.json.Decoder().decode
_WHERE = re.compile(r"(.*?)(?: - at (?:`key` in )?`\$\.?([^`]*)`)?", re.DOTALL)
_PATTERN = re.compile(r"matching regex '.*'")
_MISSING = re.compile(r"Object missing required field `(\w+)`")


@dataclass(frozen=True, slots=True)
class Parsed(Generic[B]):
    """A body that has passed the schema, and the names of the ignored fields."""

    body: B
    ignored: Collection[str]


async def parse(data: bytes, kind: type[B]) -> Parsed[B]:
    """Check a body and return it. Long ones are read on another thread. Raises APIError."""
    if len(data) > LONG_BODY_BYTES:
        return await asyncio.to_thread(parse_now, data, kind)
    return parse_now(data, kind)


def parse_now(data: bytes, kind: type[B]) -> Parsed[B]:
    """Check a body and return it. Raises APIError."""
    try:
        values = _decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _explain_json(data) from error
    if not isinstance(values, dict):
        raise APIError(400, "the body must be a JSON object", code="invalid_json")
    ignored: dict[str, None] = {}  # a set in the order of the body
    fields = kind.__struct_fields__
    values = _read(values, _Known(fields, IGNORED, UNSUPPORTED), "", ignored)
    if isinstance(values.get("stream_options"), dict):
        values["stream_options"] = _read_options(values["stream_options"], ignored)
    if "messages" in fields and isinstance(values.get("messages"), list):
        values["messages"] = [_read_message(*entry, ignored) for entry in enumerate(values["messages"])]
    try:
        return Parsed(msgspec.convert(values, kind), ignored)
    except msgspec.ValidationError as error:
        raise _explain(error) from None


@dataclass(frozen=True, slots=True)
class _Known:
    """The known names in an object of a body: its fields, and those that are ignored or refused."""

    fields: tuple[str, ...]
    ignored: Mapping[str, type]
    refused: Mapping[str, Refusal]


_MESSAGE = _Known(Message.__struct_fields__, IGNORED_IN_MESSAGES, UNSUPPORTED_IN_MESSAGES)


def _read(values: dict[str, Any], known: _Known, prefix: str, ignored: dict[str, None]) -> dict[str, Any]:
    """Return the fields; add what is ignored to `ignored`, and refuse the rest if it asks for something."""
    fields = {}
    for name, value in values.items():
        if name in known.fields:
            fields[name] = value
        elif name in known.ignored:
            if value is not None:
                _require_type(f"{prefix}{name}", value, known.ignored[name])
                ignored[f"{prefix.partition('[')[0]}.{name}" if prefix else name] = None
        else:
            _require_nothing(f"{prefix}{name[:64]}", name, value, known)
    return fields


def _require_type(shown: str, value: Any, kind: type) -> None:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        text = str(error)
        raise invalid(shown, f"{shown}: {text[:1].lower()}{text[1:]}") from None


def _require_nothing(shown: str, name: str, value: Any, known: _Known) -> None:
    refusal = known.refused.get(name)
    if refusal is None:
        near = nearest(name[:64], [*known.fields, *known.ignored, *known.refused])
        raise invalid(shown, f"unknown parameter {shown!r}.{near}", code="unknown_parameter")
    if not asks_for_nothing(refusal, value):
        raise unsupported(shown, refusal.why)


def _read_options(options: dict[str, Any], ignored: dict[str, None]) -> dict[str, Any]:
    """Return the supported options of a stream; all others are ignored, as none changes the text."""
    fields = StreamOptions.__struct_fields__
    ignored |= {f"stream_options.{name[:64]}": None for name in options if name not in fields}
    return {name: value for name, value in options.items() if name in fields}


def _read_message(index: int, message: Any, ignored: dict[str, None]) -> Any:
    if not isinstance(message, dict):
        return message
    where = f"messages[{index}]"
    if message.get("role") in ("tool", "function"):
        raise unsupported(f"{where}.role", "this server has no tool parser")
    content = message.get("content")
    for number, part in enumerate(content if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise unsupported(f"{where}.content[{number}].type", "the models here read and write text")
    return _read(message, _MESSAGE, f"{where}.", ignored)


def _explain(error: msgspec.ValidationError) -> APIError:
    found = _WHERE.fullmatch(str(error))
    what, where = (found[1], found[2] or "") if found else (str(error), "")
    if missing := _MISSING.match(what):
        where = f"{where}.{missing[1]}".lstrip(".")
        return invalid(where, f"the parameter {where!r} is missing", code="missing_parameter")
    where = where.removesuffix("[...]")
    what = _PATTERN.sub("keys of at most 64 letters, digits and _", what)
    return invalid(where, f"{where}: {what[:1].lower()}{what[1:]}")


def _explain_json(data: bytes) -> APIError:
    """Name the number that is not finite or too long, if that is what is wrong."""
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
