"""The core's process as the front sees it: started, connected, ended."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from sagellm.core import EngineDeadError
from sagellm.core.chaos import child_environment, flaky
from sagellm.engines.config.schema import EngineConfig
from sagellm.engines.serving.heartbeat import RESPONSIVE_S, Heartbeat
from sagellm.engines.serving.messages import ToCore, encode

_POLL_S = 0.02
_STOP_S = 10.0
_PROGRAM = ["-m", "sagellm.engines.serving.core_process"]


class CoreHandle:
    """One process of the core and the connection to it."""

    def __init__(
        self, process: subprocess.Popen[bytes], heartbeat: Heartbeat, transport: asyncio.Transport
    ) -> None:
        self._process = process
        self._transport = transport
        self.heartbeat = heartbeat

    @property
    def pid(self) -> int:
        """The process id of the core."""
        return self._process.pid

    @property
    def ending(self) -> str:
        """How the process ended; call it after `stop`."""
        code = self._process.returncode
        return f"signal {-code}: {signal.strsignal(-code)}" if code < 0 else f"exit code {code}"

    @classmethod
    @flaky("core.spawn", errno.ENOMEM, errno.EMFILE, rate=10, num_spared=1)
    async def start(
        cls, config: EngineConfig, socket: Path, protocol: asyncio.Protocol, *, log_level: str
    ) -> CoreHandle:
        """Start a core and connect to it; it sends Hello or Failed once its model is loaded or has failed.

        Raises EngineDeadError if the process ends before it listens.
        """
        socket.unlink(missing_ok=True)  # of a core that was killed
        values = {key: value for key, value in config.values().items() if not key.startswith("server.")}
        process, heartbeat = _start_process({"config": values, "socket": str(socket), "log_level": log_level})
        loop = asyncio.get_running_loop()
        try:
            while True:
                with suppress(OSError):
                    connect = flaky("core.connect", errno.ECONNREFUSED, rate=10)(loop.create_unix_connection)
                    transport, _ = await connect(lambda: protocol, str(socket))
                    return cls(process, heartbeat, transport)
                if process.poll() is not None:
                    raise EngineDeadError(
                        f"the engine's process ended at its start, with {process.returncode}"
                    )
                await asyncio.sleep(_POLL_S)
        except BaseException:
            process.kill()
            process.wait()
            raise

    @flaky("front.send")
    def send(self, message: ToCore) -> None:
        """Send a message; it is lost if the core is dead."""
        if not self._transport.is_closing():
            self._transport.write(encode(message))

    def kill(self) -> None:
        """Kill the process, even a suspended one."""
        self._process.kill()

    async def stop(self) -> None:
        """Terminate the process; kill it if it is unresponsive, takes 10 s, or this is cancelled."""
        self._transport.close()
        if self.heartbeat.age_s > RESPONSIVE_S:  # it would not handle the signal
            self.kill()
        self._process.terminate()
        deadline = time.monotonic() + _STOP_S
        try:
            while self._process.poll() is None:
                if time.monotonic() > deadline:
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


def _start_process(order: dict[str, Any]) -> tuple[subprocess.Popen[bytes], Heartbeat]:
    """Start a core's process with its order on standard input; return it and its heartbeat."""
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
        process.stdin.write(json.dumps({**order, "heartbeat": descriptor}).encode() + b"\n")
        process.stdin.flush()  # stays open: its end tells the core that the front is gone
    return process, heartbeat
