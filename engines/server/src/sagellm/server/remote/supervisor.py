"""Keeps one core running: starts its process, watches it, and restarts it when it dies or hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from sagellm.core import (
    ConfigError,
    EngineDeadError,
    EngineError,
    FinishReason,
    InvalidRequestError,
    SequenceId,
    get_logger,
)
from sagellm.engines.config.schema import EngineConfig
from sagellm.engines.engine_client import RESPONSIVE_S, EngineClient
from sagellm.engines.requests.queued_request import QueuedRequest
from sagellm.server.remote.core_handle import CoreHandle, Spawn, Stall, start_process
from sagellm.server.remote.messages import Call, Failed, FromCore, Hello

logger = get_logger(__name__)

_MAX_FIRST_STARTS = 4
"""Deaths before any core was ready, after which it is given up; after an error at its start, at once."""
_PAUSES_S = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Before the restart after the first death, the second, …; further ones are like the last."""
_CALM_S = 60.0
"""A core that was ready for so long resets the pauses."""
_TICK_S = 0.5

_DIED = "the engine's process died"


class WrongSettingError(EngineError, ConfigError):
    """A setting keeps the engine's process from starting."""


class Supervisor(EngineClient):
    """Reports the core's messages and deaths, and starts it again, after pauses that grow with each death.

    It never gives up once a core was ready. A core without a heartbeat for `server.frozen_after_s` is
    killed, which counts as a death, as does a start that fails.
    """

    def __init__(
        self,
        config: EngineConfig,
        socket: Path,
        *,
        on_hello: Callable[[Hello], None],
        on_message: Callable[[FromCore], None],
        on_death: Callable[[EngineDeadError], None],
        spawn: Spawn = start_process,
    ) -> None:
        self.config = config  # with the core's choices for "auto", so that a restarted one keeps them
        self.num_restarts = 0
        self._num_deaths = 0  # since a core was calm
        self._was_ready = False  # a core, at any time
        self._ended_s = self._resumes_s = 0.0
        self.core: CoreHandle | None = None
        self._ending = " ended"
        self._socket, self._spawn = socket, spawn
        self._on_hello, self._on_message, self._on_death = on_hello, on_message, on_death
        self._watching: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._failure: EngineError | None = None
        self._is_closing = False

    @property
    def is_ready(self) -> bool:
        """Whether a core runs with its model loaded."""
        return self._ready.is_set() and self._failure is None and not self._is_closing

    @property
    def is_responsive(self) -> bool:
        """Whether that core has made progress within the last 4 s, between two steps or inside one."""
        return self.is_ready and self.core is not None and self.core.heartbeat.age_s < RESPONSIVE_S

    @property
    def pause_s(self) -> float:
        """Seconds until a core is started; 0 if there is one, or one is being started."""
        return max(0.0, self._resumes_s - asyncio.get_running_loop().time())

    @property
    def status(self) -> str:
        """What is going on, in a word for people and probes."""
        if self._is_closing:
            return "closing"
        if self.is_ready:
            return "ready" if self.is_responsive else "unresponsive"
        if self.pause_s:
            return "waiting to restart"
        return "restarting" if self.num_restarts else "starting"

    async def start(self) -> None:
        """Start the core and wait until its model is loaded.

        Raises EngineError with the core's reason: a WrongSettingError if it is a setting.
        """
        self._watching = asyncio.create_task(self._keep_running())
        while not (self._ready.is_set() or self._is_closing):
            await self._ready.wait()
        if self._failure is not None:
            raise self._failure

    async def wait_until_ready(self) -> None:
        """Wait for a core that is being started. Raises EngineDeadError if none is, or it dies."""
        while not (self._is_closing or self._ready.is_set()):
            if pause_s := self.pause_s:
                told = "the engine's process ended several times, and its next start is delayed"
                raise EngineDeadError(told, retry_after_s=pause_s)
            await self._ready.wait()
        if self._is_closing:
            raise EngineDeadError("the engine is shutting down")
        if self._failure is not None:
            raise EngineDeadError(f"the engine is not running: {self._failure}")

    async def reach(self, tenant: str) -> None:
        """Wait until the running core takes requests of a tenant. Raises as `wait_until_ready` does."""
        while True:
            await self.wait_until_ready()
            core = self.core
            assert core is not None, "it is ready"
            await core.links.reach(tenant)
            if core is self.core and self.is_ready:
                return

    def add(self, requests: Sequence[QueuedRequest]) -> None:
        """Send requests of one tenant. Raises InvalidRequestError if they have values that cannot be sent."""
        if self.core is None:
            return
        try:
            self.core.links.add(requests)
        except (OverflowError, TypeError, UnicodeEncodeError) as error:  # in values that only plugins check
            raise InvalidRequestError(f"the request cannot be sent to the engine: {error}") from error

    def abort(self, sequence_ids: Iterable[SequenceId], *, finish_reason: FinishReason = "abort") -> None:
        """Have the core end sequences."""
        if self.core is not None:
            self.core.links.abort(sequence_ids, finish_reason)

    def call(self, call: Call) -> None:
        """Send a call to the running core; if there is none, it is lost."""
        if self.core is not None:
            self.core.links.calls.send(call)

    async def close(self, *, at_once: bool = False) -> None:
        """End the core; a cancellation kills it."""
        self._is_closing = True
        self._ready.set()  # release all waiters
        if self.core is not None:
            if at_once:
                self.core.kill()
            await self.core.stop()
        if self._watching is not None:
            self._watching.cancel()
            with suppress(asyncio.CancelledError):
                await self._watching
        self._socket.unlink(missing_ok=True)

    async def _keep_running(self) -> None:
        while True:
            failed = await self._attempt()
            if self._is_closing:
                return
            if not self._was_ready and (failed is not None or self._num_deaths >= _MAX_FIRST_STARTS):
                self._failure = failed or EngineDeadError(f"its process ended {self._num_deaths} times")
                self._ready.set()  # release all waiters
                return
            self.num_restarts += 1
            when = f" in {self.pause_s:.0f} s" if self.pause_s else ""
            if failed is None:
                logger.error("the engine's process%s and is restarted%s", self._ending, when)
            else:  # the missing memory or folder may be back soon
                logger.error("the engine cannot start: %s; trying again%s", failed, when)
            await asyncio.sleep(self.pause_s)

    async def _attempt(self) -> EngineError | None:
        """Run a core until it is gone; return the error if it could not start."""
        try:
            await self._run_once()
        except EngineError as error:
            return error
        except OSError as error:  # no memory or descriptors for a process
            return EngineError(f"its process cannot be started: {error}")
        except Exception:  # it sent something invalid
            logger.exception("the engine's process sent an invalid message")
        return None

    async def _run_once(self) -> None:
        """Start a core and return when it is gone. Raises EngineError if it cannot start."""
        core: CoreHandle | None = None
        ready_s, reason = None, _DIED
        try:
            core = self.core = await CoreHandle.start(
                self.config, self._socket, self._on_message, spawn=self._spawn
            )
            links, heartbeat = core.links, core.heartbeat
            stalled = await self._watch(core, links.calls.first, core.read_cpu_ticks)
            first = None if stalled else await links.calls.first
            if isinstance(first, Failed):
                raise (WrongSettingError if first.is_usage_error else EngineError)(first.message)
            if isinstance(first, Hello):
                self.config = self.config.with_values(first.config)
                self._on_hello(first)
                ready_s = self._take_up()
                stalled = await self._watch(core, links.lost, lambda: heartbeat.last_ns)
            reason = stalled or reason
        finally:
            self._count_death(ready_s)
            if core is not None:
                if not self._is_closing:
                    told = f"{reason}; send the request again"
                    self._on_death(EngineDeadError(told, retry_after_s=self.pause_s))
                await core.stop()
                self._ending = f" {core.pid} ended ({core.ending})"

    def _take_up(self) -> float:
        """Let requests go to the core, which is ready, and return the time."""
        now_s = asyncio.get_running_loop().time()
        self._was_ready = True
        self._ready.set()
        if self.num_restarts:
            logger.warning("the engine accepts requests again, after %.1f s", now_s - self._ended_s)
        return now_s

    def _count_death(self, ready_s: float | None) -> None:
        """Set the pause before the next start; `ready_s` is when this core became ready, if it did."""
        self._ended_s = now_s = asyncio.get_running_loop().time()
        if ready_s is not None and now_s - ready_s >= _CALM_S:
            self._num_deaths = 0
        self._resumes_s = now_s + _PAUSES_S[min(self._num_deaths, len(_PAUSES_S) - 1)]
        self._num_deaths += 1
        self._ready.set()  # requests that wait look again: a pause is not waited for
        self._ready.clear()

    async def _watch(
        self, core: CoreHandle, awaited: asyncio.Future[Any], progress: Callable[[], int | None]
    ) -> str | None:
        """Wait for a core's message or end; if it makes no progress, kill it and return that reason."""
        limit_s = self.config.server.frozen_after_s
        stall = Stall(limit_s, _TICK_S)
        while not (await asyncio.wait({awaited}, timeout=_TICK_S))[0]:
            if stall.is_over(progress()):
                core.kill()
                reason = f"the engine's process made no progress for {limit_s:g} s and was killed"
                logger.error("%s; it was process %d (server.frozen_after_s)", reason, core.pid)
                return reason
        return None
