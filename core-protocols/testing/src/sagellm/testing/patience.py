"""What tests share with a slow and busy machine: they wait for what comes, and keep their ports."""

from __future__ import annotations

import asyncio
import inspect
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PATIENCE_S = 120.0
"""For anything that takes a moment on an idle machine; what is not there by then does not come."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1e-4, 2e-3


def wait_until(condition: Callable[[], Any], what: str = "it did not come true in time") -> Any:
    """Return the first value that is true. Raises AssertionError, which says `what`, if none comes."""
    for pause_s in _pauses_s(what):
        if value := condition():
            return value
        time.sleep(pause_s)


async def wait_until_async(condition: Callable[[], Any], what: str = "it did not come true in time") -> Any:
    """Do as `wait_until` and let other tasks run; the condition may be a coroutine function."""
    for pause_s in _pauses_s(what):
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        await asyncio.sleep(pause_s)


def _pauses_s(what: str) -> Iterator[float]:
    end_s, pause_s = time.monotonic() + PATIENCE_S, _FIRST_PAUSE_S
    while time.monotonic() < end_s:
        yield pause_s
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    raise AssertionError(what)


def listens(path: str | Path) -> bool:
    """Say whether a server takes connections on a Unix socket, which is there a moment before."""
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


@contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a port on which a server of a test may listen, and nothing else that runs on this machine."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # so that a server may bind it as well
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]
