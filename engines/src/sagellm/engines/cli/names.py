"""Names of plugins that the tab key completes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from sagellm.core import PluginRegistry, SageLLMError

Complete = Callable[[str], list[str]]


def beginning(names: Iterable[str], incomplete: str) -> list[str]:
    """Return the names that begin with what was typed, sorted."""
    return sorted({name for name in names if name.startswith(incomplete)})


def complete_plugin(incomplete: str) -> list[str]:
    """Complete the name of a provider or of a distribution."""
    entries = PluginRegistry.load().providers()
    return beginning((name for one in entries for name in (one.provider.name, one.distribution)), incomplete)


def complete_kind(incomplete: str) -> list[str]:
    """Complete a kind that has an installed provider."""
    return beginning((one.provider.kind for one in PluginRegistry.load().providers()), incomplete)


def complete_providers(kind: str, *also: str) -> Complete:
    """Return the completions of the last of comma-separated providers: of its name, or of an option's.

    `also` are further names that the setting takes.
    """

    def complete(incomplete: str) -> list[str]:
        registry = PluginRegistry.load()
        head, brace, given = incomplete.rpartition("{")
        if brace and "}" not in given:
            last = given.rpartition(",")[2].lstrip()
            names = _options(registry, kind, re.split("[,=]", head)[-1].strip())
        else:
            last = re.split("[,=]", incomplete)[-1].lstrip()
            names = [*also, *(entry.provider.name for entry in registry.providers(kind))]
        return [incomplete.removesuffix(last) + name for name in beginning(names, last)]

    return complete


def _options(registry: PluginRegistry, kind: str, name: str) -> list[str]:
    try:
        options = registry.choose(kind, name).options()
    except SageLLMError:
        return []
    return [f"{each.name}=" for each in options if each.name[0] != "*"]
