"""Names of plugins that the tab key completes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sagellm.core import PluginRegistry

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


def complete_providers(kind: str) -> Complete:
    """Return the completions of the last one of comma-separated provider names."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        names = (entry.provider.name for entry in PluginRegistry.load().providers(kind))
        return [before + comma + name for name in beginning(names, last)]

    return complete
