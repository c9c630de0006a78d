"""Names of engines and saves that the tab key completes. Errors complete to nothing."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import typer

from sagellm.core import SageLLMError
from sagellm.engines.cli.names import beginning

_ANSWER_S = 0.5  # the user is waiting at a prompt


def complete_engine(incomplete: str) -> list[str]:
    """Complete the name of a running engine."""
    from sagellm.server.remote.running_engine import RunningEngine

    with suppress(SageLLMError, OSError):
        return beginning((engine.name for engine in RunningEngine.all()), incomplete)
    return []


def complete_save(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete the name of a save of the engine that --engine names, or of the only running one."""
    from sagellm.server.cli.running import connect

    with suppress(SageLLMError, OSError):
        _, client = connect(ctx.params.get("engine"), timeout_s=_ANSWER_S)
        with client:
            found: list[dict[str, Any]] = client.call("cache_saves")
        return beginning((each["name"] for each in found), incomplete)
    return []
