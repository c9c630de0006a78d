"""The engine's metrics: one question at a time, however many ask."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from sagellm.core import EngineMetrics
from sagellm.engines.server.front import EngineFront

TIMEOUT_S = 4.0


class EngineProbe:
    """Asks the engine for its metrics, and gives an answer to all who asked meanwhile."""

    def __init__(self, front: EngineFront) -> None:
        self._front = front
        self._asking: asyncio.Task[EngineMetrics] | None = None
        self.last = EngineMetrics()

    async def ask(self) -> None:
        """Have `last` brought up to date; it stays as it is if the engine does not answer in time."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._front.metrics())
            self._asking.add_done_callback(lambda task: task.cancelled() or task.exception())  # seen
        with suppress(Exception):  # also when it is late
            self.last = await asyncio.wait_for(asyncio.shield(self._asking), TIMEOUT_S)
