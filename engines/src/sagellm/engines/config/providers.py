"""Settings that name providers: `lru`, `qos{within=reuse}`, or `{name: qos, options: {within: reuse}}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from sagellm.core import ConfigError, ProviderSpec
from sagellm.core.plugins.option_text import read_value, split
from sagellm.engines.sizes import parse_bytes


def parse_providers(value: object) -> tuple[ProviderSpec, ...]:
    """Read a list of providers; a text is comma-separated or a list in brackets."""
    if isinstance(value, str):
        value = read_value(value) if value.lstrip().startswith("[") else split(value)
    return tuple(map(ProviderSpec.of, value if isinstance(value, list | tuple) else [value]))


def parse_tiers(value: object) -> tuple[ProviderSpec, ...]:
    """Read the tiers of `kv.tiers`, which may also be a mapping of names to sizes or options.

    Sizes become numbers of bytes. Raises ConfigError for a tier without a valid size, or named twice.
    """
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = read_value(value)
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
        raise ConfigError(
            f"the tier {tier.name!r} has no size; give its bytes, as in {{{tier.name}: 4GiB}}. "
            "`sage llm plugins list --kind kv_tier` shows what tiers there are"
        )
    max_bytes = parse_bytes(tier.options["max_bytes"], key)
    return ProviderSpec(tier.name, {**tier.options, "max_bytes": max_bytes})


def provider(kind: str, default: str | None, description: str) -> Any:
    """Declare a setting that names one provider of a kind."""
    spec = None if default is None else ProviderSpec(default)
    return Field(default=spec, description=description, json_schema_extra={"kind": kind})


def providers(kind: str, description: str) -> Any:
    """Declare a setting that names any number of providers of a kind; empty by default."""
    return Field(default=(), description=description, json_schema_extra={"kind": kind})


OneProvider = Annotated[ProviderSpec, BeforeValidator(ProviderSpec.of)]
Providers = Annotated[tuple[ProviderSpec, ...], BeforeValidator(parse_providers)]
Tiers = Annotated[tuple[ProviderSpec, ...], BeforeValidator(parse_tiers)]
