"""Reads settings that come as text, from a flag or an environment variable."""

from __future__ import annotations

from typing import Any, get_origin

from pydantic.fields import FieldInfo

from sagellm.core import ConfigError
from sagellm.engines.config.explain import kind_of, with_flat_name
from sagellm.engines.config.schema import PROVIDER_KINDS, SECTIONS

_BOOLEANS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}
_NULLS = ("null", "none", "~")


def field_of(key: str) -> FieldInfo:
    """Return the schema's field for an existing dotted key."""
    section, _, name = key.partition(".")
    return SECTIONS[section].model_fields[name]


def parse_text(key: str, text: str) -> Any:
    """Turn text into the type of a setting: names stay text, lists are YAML.

    Text that does not fit is returned as it is, so that the schema refuses it in its own words. Raises
    ConfigError for YAML that exceeds a limit (`bounded_yaml`).
    """
    kind, optional = kind_of(field_of(key))
    if optional and text.strip().lower() in _NULLS:
        return None
    if kind is bool:
        return _BOOLEANS.get(text.strip().lower(), text)
    if get_origin(kind) is tuple and key not in PROVIDER_KINDS:
        return _parse_list(key, text)
    try:
        return kind(text) if kind in (int, float) else text
    except ValueError:
        return text


def _parse_list(key: str, text: str) -> Any:
    from sagellm.engines.config.bounded_yaml import YAMLSyntaxError, parse_yaml

    try:
        return parse_yaml(text)
    except YAMLSyntaxError:
        return text
    except ConfigError as error:
        raise ConfigError(f"{with_flat_name(key)} cannot be read: {error}") from error
