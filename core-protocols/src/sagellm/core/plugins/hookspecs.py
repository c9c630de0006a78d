"""The hooks of sageLLM: two that offer implementations and commands, three that observe.

Observer hooks run at most once per step or once per request, never per token or per block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:  # every command waits for this module
    from collections.abc import Sequence

    from sagellm.core.plugins.provider import Command, Provider
    from sagellm.core.protocols.kv_events import KVCacheEvent
    from sagellm.core.request import RequestRecord, StepRecord

PROJECT = "sagellm"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def sagellm_providers() -> list[Provider]:
    """Return the implementations that this plugin offers. Called once, at loading."""


@hookspec
def sagellm_commands() -> list[Command]:
    """Return the commands that this plugin adds to `sage llm`. Called once, at loading."""


@hookspec
def sagellm_request_finished(record: RequestRecord) -> None:
    """Observe a request that has just ended, whatever the reason."""


@hookspec
def sagellm_step_finished(record: StepRecord) -> None:
    """Observe an engine step that has just ended."""


@hookspec
def sagellm_kv_events(events: Sequence[KVCacheEvent]) -> None:
    """Observe what entered and left the prefix cache, in a step or between two."""
