"""Settings that name providers: `lru`, `qos{within=reuse}`, or `{name: qos, options: {within: reuse}}`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from sagellm.core import ConfigError, ProviderSpec
from sagellm.engines.config.shown import shown
from sagellm.engines.sizes import parse_bytes

_SHORT = re.compile(r"([^{}\[\]]+)(\{.*\})", re.DOTALL)
_KEY = re.compile(r""""[^"]*"|'[^']*'|([{,]\s*)([A-Za-z_]\w*)=""")
_PLAIN = re.compile(r"[A-Za-z_][\w.-]*")
_MARK = re.compile(r""""[^"]*"|'[^']*'|[{}\[\],]""")


def parse_provider(value: object) -> ProviderSpec:
    """Read one provider in any of its forms. Raises ConfigError, whose message calls the value "it"."""
    if not isinstance(value, str):
        return ProviderSpec.of(value)
    text = value.strip()
    if text.startswith("{"):
        return ProviderSpec.of(_parse_yaml(text))
    if short := _SHORT.fullmatch(text):
        options = _KEY.sub(lambda key: f"{key[1]}{key[2]}: " if key[2] else key[0], short[2])
        return ProviderSpec.of({"name": short[1].strip(), "options": _parse_yaml(options)})
    if "{" in text or "}" in text:
        name = re.split("[{}]", text)[0]  # no more of it: options may be secrets
        raise ConfigError(f"the braces after {shown(name)} do not match; write NAME{{option=value}}")
    return ProviderSpec.of(text)


def short_form(spec: ProviderSpec) -> str:
    """Return `NAME` or `NAME{option=value, …}`, which `parse_provider` reads."""
    return spec.name + (short_options(spec.options) if spec.options else "")


def short_options(options: Mapping[str, Any]) -> str:
    """Return `{option=value, …}`; texts stand without quotes where YAML reads them as texts."""
    return "{" + ", ".join(f"{name}={_short_value(value)}" for name, value in options.items()) + "}"


def _short_value(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and _parse_yaml(value) == value:
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def parse_providers(value: object) -> tuple[ProviderSpec, ...]:
    """Read a list of providers; a text is comma-separated or a YAML list."""
    if isinstance(value, str):
        value = _parse_yaml(value) if value.lstrip().startswith("[") else split(value)
    return tuple(map(parse_provider, value if isinstance(value, list | tuple) else [value]))


def parse_tiers(value: object) -> tuple[ProviderSpec, ...]:
    """Read the tiers of `kv.tiers`, which may also be a mapping of names to sizes or options.

    Sizes become numbers of bytes. Raises ConfigError for a tier without a valid size, or named twice.
    """
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = _parse_yaml(value)
    if isinstance(value, Mapping) and "name" not in value:
        value = [
            {"name": name, "options": each if isinstance(each, Mapping) else {"max_bytes": each}}
            for name, each in value.items()
        ]
    tiers = tuple(map(_sized, parse_providers(value)))
    names = [each.name for each in tiers]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"it names {twice[0]!r} twice; keep one")
    return tiers


def _sized(tier: ProviderSpec) -> ProviderSpec:
    key = f"{tier.name}.max_bytes"
    if "max_bytes" not in tier.options:
        raise ConfigError(f"{key} is missing; give bytes, as in 4GiB")
    max_bytes = parse_bytes(tier.options["max_bytes"], key)
    return ProviderSpec(tier.name, {**tier.options, "max_bytes": max_bytes})


def _parse_yaml(text: str) -> Any:
    from sagellm.engines.config.bounded_yaml import YAMLSyntaxError, parse_yaml

    try:
        return parse_yaml(text)
    except YAMLSyntaxError as error:
        raise ConfigError(f"it is not YAML: {error}") from error


def split(text: str) -> list[str]:
    """Split at commas outside of brackets and quotes."""
    depth, start, parts = 0, 0, []
    for mark in _MARK.finditer(text):
        depth += (mark[0] in "{[") - (mark[0] in "}]")
        if mark[0] == "," and depth == 0:
            parts.append(text[start : mark.start()])
            start = mark.end()
    return [part.strip() for part in (*parts, text[start:]) if part.strip()]


def provider(kind: str, default: str | None, description: str) -> Any:
    """Declare a setting that names one provider of a kind."""
    spec = None if default is None else ProviderSpec(default)
    return Field(default=spec, description=description, json_schema_extra={"kind": kind})


def providers(kind: str, description: str) -> Any:
    """Declare a setting that names any number of providers of a kind; empty by default."""
    return Field(default=(), description=description, json_schema_extra={"kind": kind})


OneProvider = Annotated[ProviderSpec, BeforeValidator(parse_provider)]
Providers = Annotated[tuple[ProviderSpec, ...], BeforeValidator(parse_providers)]
Tiers = Annotated[tuple[ProviderSpec, ...], BeforeValidator(parse_tiers)]
