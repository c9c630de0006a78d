"""A running engine for the commands that ask one."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from sagellm.engines.testing.cli_fixtures import *


@pytest.fixture
def run_engine(tmp_path, monkeypatch) -> Iterator[Callable[..., Any]]:
    """Have an engine listen under a name, its core in a thread, as `engine start` would in a process.

    With `steps=False` the thread answers only, so that a test can generate meanwhile.
    """
    monkeypatch.setenv("SAGELLM_RUNTIME_DIR", str(tmp_path / "run"))
    with ExitStack() as engines:
        yield lambda engine, name="one", *, steps=True: engines.enter_context(
            _listening(engine, name, steps=steps)
        )


class _Unstepped:
    """A core that never asks to be stepped."""

    def __init__(self, core: Any) -> None:
        self._core = core

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def has_unfinished(self) -> bool:
        return False


@contextmanager
def _listening(engine: Any, name: str, *, steps: bool) -> Iterator[Any]:
    from sagellm.server.remote import CoreServer, EngineLock, RunningEngine
    from sagellm.server.remote.core_process import listen
    from sagellm.server.remote.messages import Hello
    from sagellm.server.remote.operations import core_operations

    running = RunningEngine(name=name, pid=os.getpid(), url="http://127.0.0.1:8000", model="tiny")
    hello = Hello(engine.config.values(), engine.driver.input.limits, engine.default_params, os.getpid())
    core = engine.client.core
    stepped = core if steps else _Unstepped(core)
    server = CoreServer(stepped, listen(running.socket), hello, core_operations(core))
    thread = threading.Thread(target=server.serve)
    thread.start()
    lock = EngineLock(name)
    running.announce()
    try:
        yield running
    finally:
        server.stop()
        thread.join()
        server.close()
        lock.release()
