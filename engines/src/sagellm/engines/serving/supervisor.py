"""Keeps one core running: starts its process, watches it, starts it again when it dies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from sagellm.core import EngineDeadError, EngineError, get_logger
from sagellm.engines.config.schema import EngineConfig
from sagellm.engines.serving.core_handle import CoreHandle
from sagellm.engines.serving.messages import Failed, FrameReader, FromCore, Hello, ToCore

logger = get_logger(__name__)

_MAX_RESTARTS = 3
_RESTARTS_WITHIN_S = 60.0
_RETRY_S = 2.0


class Supervisor:
    """Passes on what the core says, and its deaths. One that dies four times in a minute stays dead."""

    def __init__(
        self,
        config: EngineConfig,
        socket: Path,
        *,
        on_hello: Callable[[Hello], None],
        on_message: Callable[[FromCore], None],
        on_death: Callable[[EngineDeadError], None],
        log_level: str = "WARNING",
    ) -> None:
        self.config = config  # with what the core chose for "auto", so that a second one chooses the same
        self.num_restarts = 0
        self.core: CoreHandle | None = None
        self._socket, self._log_level = socket, log_level
        self._on_hello, self._on_message, self._on_death = on_hello, on_message, on_death
        self._watching: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._failure: EngineError | None = None
        self._is_closing = False

    @property
    def is_ready(self) -> bool:
        """Whether a core runs with its model loaded."""
        return self._ready.is_set() and self._failure is None and not self._is_closing

    async def start(self) -> None:
        """Start the core and wait until its model is loaded. Raises EngineError with its reason."""
        self._watching = asyncio.create_task(self._keep_running())
        await self._ready.wait()
        if self._failure is not None:
            raise self._failure

    async def wait_until_ready(self) -> None:
        """Wait for a core that is being started. Raises EngineDeadError if there will be none."""
        if not self._is_closing:
            await self._ready.wait()
        if self._is_closing:
            raise EngineDeadError("the engine is shutting down")
        if self._failure is not None:
            raise EngineDeadError(f"the engine is not running: {self._failure}")

    def send(self, message: ToCore) -> None:
        """Send a message to the core that runs; without one it is lost."""
        if self.core is not None:
            self.core.send(message)

    async def close(self) -> None:
        """End the core."""
        self._is_closing = True
        self._ready.set()  # nobody shall wait any longer
        if self.core is not None:
            await self.core.stop()
        if self._watching is not None:
            self._watching.cancel()
            with suppress(asyncio.CancelledError):
                await self._watching
        self._socket.unlink(missing_ok=True)

    async def _keep_running(self) -> None:
        deaths: list[float] = []
        while True:
            try:
                await self._run_once()
            except EngineError as error:
                self._failure = error
            except OSError as error:  # no memory or descriptors for a process
                if self.num_restarts:  # what is lacking may be there again soon
                    logger.error("the engine's process cannot be started again yet: %s", error)
                    await asyncio.sleep(_RETRY_S)
                    continue
                self._failure = EngineError(f"its process cannot be started: {error}")
            if self._is_closing:
                return
            now = time.monotonic()
            deaths = [*(death for death in deaths if now - death < _RESTARTS_WITHIN_S), now]
            if self._failure is None and len(deaths) > _MAX_RESTARTS:
                self._failure = EngineDeadError(f"its process died {len(deaths)} times within a minute")
            if self._failure is not None:
                if self.num_restarts:  # what fails at the first start is raised there
                    logger.error("the engine stays down: %s", self._failure)
                self._ready.set()  # nobody shall wait for it
                return
            self.num_restarts += 1
            logger.error("the engine's process died; it is started again")

    async def _run_once(self) -> None:
        """Start a core and return when it is gone. Raises EngineError if it cannot start."""
        link = _Link(self._on_message)
        self.core = await CoreHandle.start(self.config, self._socket, link, log_level=self._log_level)
        first = await link.first
        if isinstance(first, Hello):
            self.config = self.config.with_values(first.config)
            self._on_hello(first)
            self._ready.set()
            await link.lost
        self._ready.clear()
        if not self._is_closing:
            self._on_death(EngineDeadError("the engine's process died; send the request again"))
        await self.core.stop()
        if isinstance(first, Failed):
            raise EngineError(first.message)


class _Link(asyncio.Protocol):
    """One connection to a core: its first message, then all others, then the end."""

    def __init__(self, receive: Callable[[FromCore], None]) -> None:
        loop = asyncio.get_running_loop()
        self.first: asyncio.Future[FromCore | None] = loop.create_future()
        self.lost: asyncio.Future[None] = loop.create_future()
        self._reader = FrameReader(FromCore)
        self._receive = receive
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._reader.feed(data):
                if not self.first.done():
                    self.first.set_result(message)
                else:
                    self._receive(message)
        except Exception:
            logger.exception("the engine's messages cannot be followed; it is started again")
            assert self._transport is not None
            self._transport.close()

    def connection_lost(self, _error: Exception | None) -> None:
        if not self.first.done():
            self.first.set_result(None)
        if not self.lost.done():
            self.lost.set_result(None)
