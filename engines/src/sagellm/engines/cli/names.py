"""Names that the tab key completes: of engines, saves and plugins. Errors complete to nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import typer

from sagellm.core import PluginRegistry, SageLLMError

_ANSWER_S = 0.5  # the user is waiting at a prompt

Complete = Callable[[str], list[str]]


def _beginning(names: Iterable[str], incomplete: str) -> list[str]:
    return sorted({name for name in names if name.startswith(incomplete)})


def complete_engine(incomplete: str) -> list[str]:
    """Complete the name of a running engine."""
    from sagellm.engines.remote.running_engine import RunningEngine

    with suppress(SageLLMError, OSError):
        return _beginning((engine.name for engine in RunningEngine.all()), incomplete)
    return []


def complete_save(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete the name of a save of the engine that --engine names, or of the only running one."""
    from sagellm.engines.cli.running import connect

    with suppress(SageLLMError, OSError):
        _, client = connect(ctx.params.get("engine"), timeout_s=_ANSWER_S)
        with client:
            found: list[dict[str, Any]] = client.call("cache_saves")
        return _beginning((each["name"] for each in found), incomplete)
    return []


def complete_plugin(incomplete: str) -> list[str]:
    """Complete the name of a provider or of a distribution."""
    entries = PluginRegistry.load().providers()
    return _beginning((name for one in entries for name in (one.provider.name, one.distribution)), incomplete)


def complete_kind(incomplete: str) -> list[str]:
    """Complete a kind that has an installed provider."""
    return _beginning((one.provider.kind for one in PluginRegistry.load().providers()), incomplete)


def complete_providers(kind: str) -> Complete:
    """Return the completions of the last one of comma-separated provider names."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        names = (entry.provider.name for entry in PluginRegistry.load().providers(kind))
        return [before + comma + name for name in _beginning(names, last)]

    return complete
