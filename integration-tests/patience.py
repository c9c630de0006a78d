"""Waits for what comes, as long as a slow and busy machine may need."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 120.0
"""For anything that takes a moment on an idle machine; what is not there by then does not come."""

_POLL_S = 0.002


def wait_until(condition: Callable[[], Any], what: str = "it did not come to be") -> Any:
    """Return the first value that is true. Raises AssertionError, which says `what`, if none comes."""
    end_s = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < end_s, what
        time.sleep(_POLL_S)
    return value


async def wait_until_async(condition: Callable[[], Any], what: str = "it did not come to be") -> Any:
    """Do as `wait_until` and let other tasks run; the condition may be a coroutine function."""
    end_s = time.monotonic() + PATIENCE_S
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        assert time.monotonic() < end_s, what
        await asyncio.sleep(_POLL_S)
