"""Fetches the engine's metrics, with one call at a time for all concurrent requests."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from sagellm.core import EngineMetrics
from sagellm.engines.server.front import EngineFront

TIMEOUT_S = 4.0


class EngineProbe:
    """Fetches the engine's metrics; concurrent calls share one request."""

    def __init__(self, front: EngineFront) -> None:
        self._front = front
        self._asking: asyncio.Task[EngineMetrics] | None = None
        self.last = EngineMetrics()
        self._num_restarts = front.num_restarts

    async def ask(self) -> None:
        """Update `last`, unless the engine does not answer within 4 s.

        An unresponsive engine is not asked, because that is when the page is needed most. A restart resets
        `last`.
        """
        if self._num_restarts != self._front.num_restarts:
            self._num_restarts, self.last = self._front.num_restarts, EngineMetrics()
        if not self._front.is_responsive:
            return
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._front.metrics())
            self._asking.add_done_callback(lambda task: task.cancelled() or task.exception())  # seen
        with suppress(Exception):  # even if it is late
            self.last = await asyncio.wait_for(asyncio.shield(self._asking), TIMEOUT_S)
