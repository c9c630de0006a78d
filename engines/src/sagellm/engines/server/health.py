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
        self._num_restarts = front.num_restarts

    async def ask(self) -> None:
        """Have `last` brought up to date; it stays as it is if the engine does not answer in time.

        One that makes no progress is not asked: a page is wanted most while it cannot answer. What a process
        said of itself is forgotten with it.
        """
        if self._num_restarts != self._front.num_restarts:
            self._num_restarts, self.last = self._front.num_restarts, EngineMetrics()
        if not self._front.is_responsive:
            return
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._front.metrics())
            self._asking.add_done_callback(lambda task: task.cancelled() or task.exception())  # seen
        with suppress(Exception):  # also when it is late
            self.last = await asyncio.wait_for(asyncio.shield(self._asking), TIMEOUT_S)
