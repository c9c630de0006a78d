"""From bytes to a body that has passed the schema, or an error that names the parameter."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from sagellm.core import nearest
from sagellm.engines.server.body import LONG_BODY_BYTES
from sagellm.engines.server.errors import APIError, invalid, unsupported
from sagellm.engines.server.schema import Body, ChatBody, Message, StreamOptions
from sagellm.engines.server.unsupported import (
    UNSUPPORTED,
    UNSUPPORTED_IN_MESSAGES,
    UNSUPPORTED_STREAM_OPTIONS,
    Refusal,
    asks_for_nothing,
)

B = TypeVar("B", bound=Body)

_decode = msgspec.json.Decoder().decode
_WHERE = re.compile(r"(.*?)(?: - at `\$\.?([^`]*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(\w+)`")


async def parse(data: bytes, kind: type[B]) -> B:
    """Check a body and return it. Long ones are read on another thread. Raises APIError."""
    if len(data) > LONG_BODY_BYTES:
        return await asyncio.to_thread(parse_now, data, kind)
    return parse_now(data, kind)


def parse_now(data: bytes, kind: type[B]) -> B:
    """Check a body and return it. Raises APIError."""
    try:
        values = _decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _explain_json(data) from error
    if not isinstance(values, dict):
        raise APIError(400, "the body must be a JSON object", code="invalid_json")
    values = _known(values, kind.__struct_fields__, UNSUPPORTED, "")
    if isinstance(values.get("stream_options"), dict):
        options = values["stream_options"]
        values["stream_options"] = _known(
            options, StreamOptions.__struct_fields__, UNSUPPORTED_STREAM_OPTIONS, "stream_options."
        )
    if kind is ChatBody and isinstance(values.get("messages"), list):
        values["messages"] = [_known_message(*entry) for entry in enumerate(values["messages"])]
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise _explain(error) from None


def _known(
    values: dict[str, Any], fields: tuple[str, ...], table: Mapping[str, Refusal], prefix: str
) -> dict[str, Any]:
    """Return the values without those that ask for nothing; refuse the rest of what is no field."""
    known = {}
    for name, value in values.items():
        if name in fields:
            known[name] = value
            continue
        shown = f"{prefix}{name[:64]}"
        refusal = table.get(name)
        if refusal is None:
            message = f"unknown parameter {shown!r}.{nearest(name[:64], [*fields, *table])}"
            raise invalid(shown, message, code="unknown_parameter")
        if not asks_for_nothing(refusal, value):
            raise unsupported(shown, refusal.why)
    return known


def _known_message(index: int, message: Any) -> Any:
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
    return _known(message, Message.__struct_fields__, UNSUPPORTED_IN_MESSAGES, f"{where}.")


def _explain(error: msgspec.ValidationError) -> APIError:
    found = _WHERE.fullmatch(str(error))
    what, where = (found[1], found[2] or "") if found else (str(error), "")
    if missing := _MISSING.match(what):
        where = f"{where}.{missing[1]}".lstrip(".")
        return invalid(where, f"the parameter {where!r} is missing", code="missing_parameter")
    where = where.removesuffix("[...]")
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
