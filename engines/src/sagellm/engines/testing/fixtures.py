"""Fixtures for the tests of engine, server and lab: a checkpoint made once, engines, a held step, a Redis.

    from sagellm.engines.testing.fixtures import *

in a conftest.py. Needs pytest and sagellm-testing, as nothing else in this package does.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from sagellm.engines import LLMEngine
from sagellm.engines.testing import make_checkpoint
from sagellm.engines.testing.steps import HeldCores, held
from sagellm.testing.patience import listens, wait_until

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # So it is in the background of a shell without job control, and programs that are started inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

torch.set_num_threads(1)  # the models are so small that a second thread only costs


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Undo what a command run in this process sets up for the log: its stderr ends with the test."""
    logger = logging.getLogger("sagellm")
    handlers, level, propagate = logger.handlers.copy(), logger.level, logger.propagate
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)
    logger.propagate = propagate


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a small Qwen3 checkpoint."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "qwen3", family="qwen3", seed=7)


@pytest.fixture(scope="session")
def make_engine(checkpoint: Path) -> Callable[..., LLMEngine]:
    """Return what makes an engine of the checkpoint with some settings.

    Requests without a seed draw the same tokens each time: a stop token ends none of them by chance.
    """

    def make(**settings: Any) -> LLMEngine:
        defaults: dict[str, Any] = {
            "model": str(checkpoint),
            "dtype": "float32",
            "device": "cpu",
            "num_blocks": 128,
            "max_num_batched_tokens": 256,
            "seed": 0,
        }
        return LLMEngine(**(defaults | settings))

    return make


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., threading.Event]]:
    """Have an engine of this process do nothing once each request has some tokens, until the event is set.

    So whatever a test does meanwhile comes before the end of its requests, however fast the machine is.
    """
    released: list[threading.Event] = []

    def start(engine: LLMEngine, num_tokens: int = 0) -> threading.Event:
        core: Any = engine.client.core
        is_released = threading.Event()
        released.append(is_released)
        step = held(type(core).step, lambda: not is_released.is_set(), num_tokens)
        monkeypatch.setattr(core, "step", partial(step, core))
        return is_released

    yield start
    for each in released:
        each.set()


@pytest.fixture
def held_cores(tmp_path: Path) -> HeldCores:
    """Return what holds the cores of served engines."""
    return HeldCores(tmp_path)


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where a server listens that is started for these tests."""
    pytest.importorskip("redis")
    server = shutil.which("redis-server") or shutil.which("valkey-server")
    if server is None:
        assert "CI" not in os.environ, "redis-server is not installed, and CI skips no test for want of it"
        pytest.skip("redis-server is not installed")
    socket = tmp_path_factory.mktemp("redis") / "redis.sock"
    options = ["--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", str(socket.parent)]
    process = subprocess.Popen([server, *options], stdout=subprocess.DEVNULL)
    wait_until(lambda: listens(socket) or process.poll() is not None)
    assert process.poll() is None, "the server did not start"
    yield f"unix://{socket}"
    process.kill()
    process.wait()


def free_everywhere(engine: LLMEngine) -> bool:
    """Whether no request holds a block: every block is free or merely cached."""
    kv = engine.client.core.kv  # type: ignore[attr-defined]
    kv.check_integrity()
    return bool(kv.available_blocks == kv.total_blocks)


@pytest.fixture(scope="session")
def all_blocks_are_back() -> Callable[[LLMEngine], bool]:
    """Return `free_everywhere`."""
    return free_everywhere
