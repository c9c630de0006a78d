"""Whether the engine's loop turns: one question at a time, however many ask."""

from __future__ import annotations

import asyncio
import time

from sagellm.core import EngineMetrics
from sagellm.engines.server.front import EngineFront

TIMEOUT_S = 4.0


class EngineProbe:
    """Asks the engine for its metrics, and gives an answer to all who asked meanwhile."""

    def __init__(self, front: EngineFront) -> None:
        self._front = front
        self._asking: asyncio.Task[EngineMetrics] | None = None
        self._answered = 0.0
        self.last = EngineMetrics()

    async def ask(self, max_age_s: float = 0.25) -> EngineMetrics | None:
        """Return a snapshot that is at most so old, or None if the engine does not answer."""
        if time.monotonic() - self._answered < max_age_s:
            return self.last
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._front.metrics())
            self._asking.add_done_callback(lambda task: task.cancelled() or task.exception())  # seen
        try:
            self.last = await asyncio.wait_for(asyncio.shield(self._asking), TIMEOUT_S)
        except Exception:  # also when it is late
            return None
        self._answered = time.monotonic()
        return self.last
