"""The core's process as the front sees it: started, connected, ended."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, TypeAlias

from sagellm.core import ConfigError, EngineDeadError
from sagellm.core.chaos import flaky
from sagellm.core.runtime_folder import own_folder
from sagellm.engines.config.schema import EngineConfig
from sagellm.engines.engine_client import RESPONSIVE_S
from sagellm.engines.logging import is_json
from sagellm.server.chaos import child_environment
from sagellm.server.remote.heartbeat import Heartbeat
from sagellm.server.remote.links import Links
from sagellm.server.remote.messages import FromCore

_POLL_S = 0.02
_STOP_S = 10.0
_PROGRAM = ["-m", "sagellm.server.remote.core_process"]


class CoreProcess(Protocol):
    """A process that runs a core: what is needed of `subprocess.Popen`."""

    @property
    def pid(self) -> int:
        """Its id."""

    @property
    def returncode(self) -> int | None:
        """How it ended: its exit code or the negative number of a signal; None while it is not known."""

    def poll(self) -> int | None:
        """Look whether it has ended, and return `returncode`."""

    def wait(self) -> int:
        """Block until it has ended."""

    def terminate(self) -> None:
        """Ask it to end."""

    def kill(self) -> None:
        """End it at once."""

    @property
    def stdin(self) -> IO[bytes] | None:
        """Its standard input, whose end tells it that the front is gone; None if it has none."""


class Spawned(NamedTuple):
    """A process that was started, and the signs of its progress."""

    process: CoreProcess
    heartbeat: Heartbeat
    num_cpu_ticks: Callable[[], int | None]  # its CPU time, None if unknown


Spawn: TypeAlias = Callable[[dict[str, Any]], Spawned]
"""Starts a process with an order: the configuration and where to listen. Raises OSError."""


class Stall:
    """Detects a lack of progress, by a number that changes when there is progress.

    Time counts only in ticks of this process: if both were stopped for an hour and resume together, one tick
    has passed. A limit of 0 means no limit.
    """

    def __init__(self, limit_s: float, tick_s: float) -> None:
        self._limit_s, self._tick_s = limit_s, tick_s
        self._last: int | None = None
        self._stalled_s = 0.0

    def is_over(self, progress: int | None) -> bool:
        """Take the number at this tick, None if unknown; say whether the limit is reached."""
        is_same = progress is not None and progress == self._last
        self._stalled_s = self._stalled_s + self._tick_s if is_same else 0.0
        self._last = progress
        return 0 < self._limit_s <= self._stalled_s


class CoreHandle:
    """One process of the core and the connections to it."""

    def __init__(self, spawned: Spawned, links: Links) -> None:
        self._process, self.heartbeat, self.read_cpu_ticks = spawned
        self.links = links

    @property
    def pid(self) -> int:
        """The process id of the core."""
        return self._process.pid

    @property
    def ending(self) -> str:
        """How the process ended; call it after `stop`."""
        code = self._process.returncode
        assert code is not None, "`stop` waits for the end"
        return f"signal {-code}: {signal.strsignal(-code)}" if code < 0 else f"exit code {code}"

    @classmethod
    @flaky("core.spawn", errno.ENOMEM, errno.EMFILE, rate=10, num_spared=1)
    async def start(
        cls, config: EngineConfig, socket: Path, receive: Callable[[FromCore], None], *, spawn: Spawn
    ) -> CoreHandle:
        """Start a core and connect to it; it sends Hello or Failed once its model is loaded or has failed.

        Raises EngineDeadError if the process ends or stalls before it listens.
        """
        try:
            own_folder(socket.parent)  # the system may have removed it while the server ran
        except ConfigError as error:
            raise EngineDeadError(f"its process cannot be started: {error}") from error
        socket.unlink(missing_ok=True)  # of a core that was killed
        values = {key: value for key, value in config.values().items() if not key.startswith("server.")}
        spawned = spawn({"config": values, "socket": str(socket)})
        process = spawned.process
        links = Links(socket, receive)
        stall = Stall(config.server.frozen_after_s, _POLL_S)
        try:
            while True:
                with suppress(OSError):
                    await links.open()
                    return cls(spawned, links)
                if process.poll() is not None:
                    raise EngineDeadError(
                        f"the engine's process ended at its start, with {process.returncode}"
                    )
                if stall.is_over(spawned.num_cpu_ticks()):
                    raise EngineDeadError("the engine's process made no progress at its start")
                await asyncio.sleep(_POLL_S)
        except BaseException:
            process.kill()
            process.wait()
            raise

    def kill(self) -> None:
        """Kill the process, even a suspended one."""
        self._process.kill()

    async def stop(self) -> None:
        """Terminate the process; kill it if it is unresponsive, takes 10 s, or this is cancelled."""
        self.links.close()
        if self.heartbeat.age_s > RESPONSIVE_S:  # it would not handle SIGTERM
            self.kill()
        self._process.terminate()
        now_s = asyncio.get_running_loop().time
        deadline_s = now_s() + _STOP_S
        try:
            while self._process.poll() is None:
                if now_s() > deadline_s:
                    self.kill()
                await asyncio.sleep(_POLL_S)
        except asyncio.CancelledError:
            self.kill()
            self._process.wait()
            raise
        finally:
            if self._process.stdin is not None:
                with suppress(BrokenPipeError):
                    self._process.stdin.close()


def _num_cpu_ticks(pid: int) -> int | None:
    """Return the CPU time of a process with all its threads, in the system's ticks; None except on Linux."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2]
        user, system = fields.split()[11:13]
    except (OSError, ValueError):
        return None
    return int(user) + int(system)


def start_process(order: dict[str, Any], *, log_level: str = "WARNING") -> Spawned:
    """Start a core's process with its order on standard input."""
    heartbeat, descriptor = Heartbeat.create()
    try:
        process = subprocess.Popen(
            [sys.executable, *_PROGRAM],
            stdin=subprocess.PIPE,
            env=child_environment(),
            pass_fds=(descriptor,),
        )
    finally:
        os.close(descriptor)
    assert process.stdin is not None, "a pipe was asked for"
    with suppress(BrokenPipeError):
        process.stdin.write(
            json.dumps(
                {**order, "log_level": log_level, "logs_json": is_json(), "heartbeat": descriptor}
            ).encode()
            + b"\n"
        )
        process.stdin.flush()  # stays open: its end tells the core that the front is gone
    return Spawned(process, heartbeat, partial(_num_cpu_ticks, process.pid))
