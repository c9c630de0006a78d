"""Splits a JSON object into its fields: known ones, ignored ones, and refused ones with the reason."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from msgspec import Raw

from sagellm.core import nearest
from sagellm.engines.server.body import LONG_BODY_BYTES, object_fault
from sagellm.engines.server.errors import APIError, invalid, unsupported
from sagellm.engines.server.unsupported import Refusal, asks_for_nothing

T = TypeVar("T")

_decode_names = msgspec.json.Decoder(dict[str, Raw]).decode
_MAX_NEUTRAL_BYTES = 1 << 10
_FIRST_BYTES = {dict: b"{", list: b"[", str: b'"', bool: b"tf"}
_WHERE = re.compile(r"(.*?)(?: - at (?:`key` in )?`\$\.?([^`]*)`)?", re.DOTALL)
_PATTERN = re.compile(r"matching regex '.*'")


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
    values: Mapping[str, Raw], known: Known, prefix: str, ignored: dict[str, None]
) -> dict[str, Raw]:
    """Return the known fields and add ignored ones to `ignored`.

    Raises APIError for any other, unless its value requests nothing, such as null or false.
    """
    fields = {}
    for name, raw in values.items():
        if name in known.fields:
            fields[name] = raw
            continue
        value = memoryview(raw)
        if name in known.ignored:
            if not is_null(value):
                _require_type(f"{prefix}{name}", value, known.ignored[name])
                ignored[f"{prefix.partition('[')[0]}.{name}" if prefix else name] = None
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
        raise invalid(shown, f"unknown parameter {shown!r}.{near}", code="unknown_parameter")
    is_long = len(value) > _MAX_NEUTRAL_BYTES  # longer than any value that requests nothing
    if is_long or not asks_for_nothing(refusal, _decode_short(value)):
        raise unsupported(shown, refusal.why)


def _decode_short(value: memoryview) -> Any:
    try:
        return msgspec.json.decode(value)
    except UnicodeDecodeError:
        return value
