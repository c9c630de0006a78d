"""Turns pydantic's findings into one sentence per mistake: key, value, what is possible."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from sagellm.core import ConfigError, nearest
from sagellm.core.plugins import options
from sagellm.engines.config.settings import ALL_NAMES
from sagellm.engines.config.shown import shown

_MAX_LINES = 20


class Aliases(dict[str, str]):
    """Metadata of a field: other names of some of its choices."""


def explain(error: ValidationError, model: type[BaseModel], section: str) -> ConfigError:
    """Phrase every finding of `error`, one per line. `section` is "" for the whole configuration."""
    lines = []
    errors = error.errors(include_url=False)
    for found in errors[:_MAX_LINES]:
        cause = found.get("ctx", {}).get("error")
        name = str(found["loc"][0]) if found["loc"] else ""
        key = f"{section}.{name}" if section else name
        if isinstance(cause, ConfigError):  # a section has already phrased its own error
            lines.append(f"{with_flat_name(key)} cannot be read: {cause}" if section else str(cause))
            continue
        if found["type"] == "extra_forbidden":
            lines.append(unknown_key(key, section, list(model.model_fields)))
        else:
            must = str(cause) if cause is not None else possible(model.model_fields[name])
            value = shown(found["input"]) if model.model_fields[name].repr else "not shown"  # a secret
            lines.append(f"{with_flat_name(key)} is {value}; it must be {must}")
    if len(errors) > _MAX_LINES:
        lines.append(f"and {len(errors) - _MAX_LINES} more")
    return ConfigError("\n".join(lines))


def unknown_key(key: str, section: str, known: list[str]) -> str:
    """Say that a key does not exist, which keys do, and which was probably meant."""
    if not section and key in ALL_NAMES:
        return f"unknown section {key!r}; the setting is {ALL_NAMES[key]}, or EngineConfig.from_flat({key}=…)"
    what, where = ("setting", f"{section} has") if section else ("section", "the sections are")
    return f"unknown {what} {shown(key)}; {where} {', '.join(known)}.{nearest(key.rpartition('.')[2], known)}"


def with_flat_name(key: str) -> str:
    """Add the flat name if it is not the last word of the key."""
    flat = next((flat for flat, dotted in ALL_NAMES.items() if dotted == key), "")
    return key if not flat or key.endswith(f".{flat}") else f"{key} ({flat})"


def possible(field: FieldInfo) -> str:
    """Describe what a field accepts: `a whole number from 1 to 1024, or null`."""
    kind, optional = kind_of(field)
    text = _phrase(kind, field)
    return f"{text}, or null" if optional else text


def kind_of(field: FieldInfo) -> tuple[Any, bool]:
    """Return a field's type without None, and whether it may be None."""
    annotation = field.annotation
    if get_origin(annotation) in (Union, types.UnionType):
        member = next(member for member in get_args(annotation) if member is not type(None))
        return (get_args(member)[0] if get_origin(member) is Annotated else member), True
    return annotation, False


def _phrase(kind: Any, field: FieldInfo) -> str:
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(_choices(kind, field))
    if kind is str:
        return "a text that is not empty"
    if get_origin(kind) is tuple:
        return "a list of texts that are not empty"
    return options.possible(Annotated[(kind, *field.metadata)] if field.metadata else kind)


def _choices(kind: Any, field: FieldInfo) -> Iterator[str]:
    aliases = next((each for each in field.metadata if isinstance(each, Aliases)), Aliases())
    for choice in get_args(kind):
        others = [alias for alias, name in aliases.items() if name == choice]
        yield f"{choice} (or {', '.join(others)})" if others else str(choice)
