"""Watches the client itself: its CPU time, and how late its event loop runs."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from types import TracebackType

from sagellm.engines.metrics.latency import percentile

_TICK_S = 0.02
BUSY_SHARE = 0.7
LATE_MS = 10.0


@dataclass(frozen=True, kw_only=True)
class ClientLoad:
    """How much of the machine the client used, and how much it may have added to the times."""

    cpu_s: float
    cpu_share: float  # of one core, over the run
    cpu_us_per_event: float | None  # CPU time ÷ events of all streams
    loop_lag_p99_ms: float
    loop_lag_max_ms: float

    @property
    def warnings(self) -> list[str]:
        """Return warnings where the client, not the server, may have been measured."""
        found = []
        if self.cpu_share > BUSY_SHARE:
            found.append(
                f"the client kept {self.cpu_share:.0%} of a core busy: it was the bottleneck; "
                "the server may be faster than these figures"
            )
        if self.loop_lag_p99_ms > LATE_MS:
            found.append(
                f"the client's event loop ran {self.loop_lag_p99_ms:.0f} ms late (p99): times may be "
                "that much too long; give the client a core of its own or run it elsewhere"
            )
        return found


class ClientWatch:
    """Measures for the duration of the `async with` block."""

    def __init__(self) -> None:
        self._lags_ms = [0.0]
        self._cpu_s = self._wall_s = 0.0

    async def __aenter__(self) -> ClientWatch:
        self._cpu_s, self._wall_s = -time.process_time(), -time.perf_counter()
        self._ticker = asyncio.create_task(self._tick())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ticker.cancel()
        self._cpu_s += time.process_time()
        self._wall_s += time.perf_counter()

    async def _tick(self) -> None:
        while True:
            started = time.perf_counter()
            await asyncio.sleep(_TICK_S)
            self._lags_ms.append(max(0.0, time.perf_counter() - started - _TICK_S) * 1e3)

    def load(self, num_events: int) -> ClientLoad:
        """Return what was measured, for a run that read this many events."""
        return ClientLoad(
            cpu_s=self._cpu_s,
            cpu_share=self._cpu_s / self._wall_s if self._wall_s else 0.0,
            cpu_us_per_event=self._cpu_s * 1e6 / num_events if num_events else None,
            loop_lag_p99_ms=percentile(self._lags_ms, 99),
            loop_lag_max_ms=max(self._lags_ms),
        )
