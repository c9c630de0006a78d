"""Runs the programs in this process, away from the user's own settings."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from sagellm.engines.cli import main


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def json_lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]


_MOON = """
from sagellm.core import NullEvictionPolicy, Provider, hookimpl

class Moon(NullEvictionPolicy):
    def add_candidate(self, node):
        raise RuntimeError("no moon tonight")

@hookimpl
def sagellm_providers():
    return [Provider("eviction_policy", "moon", f"{__name__}:Moon", "by the moon")]
"""


@pytest.fixture(autouse=True)
def _quiet_place(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("SAGELLM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SAGELLM_RATES_FILE", "off")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def sage(capfd):
    def run(*arguments: str) -> Result:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        return Result(ended.value.code or 0, captured.out, captured.err)

    return run


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a plugin distribution that exists in this test only."""

    def make(name: str, source: str) -> None:
        site = tmp_path / "site"
        module = name.replace("-", "_")
        info = site / f"{module}-1.5.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n"
            "Requires-Dist: sagellm-core-protocols>=0.1,<0.2\n"
        )
        (info / "entry_points.txt").write_text(f"[sagellm]\n{module} = {module}\n")
        (site / f"{module}.py").write_text(source)
        monkeypatch.delitem(sys.modules, module, raising=False)  # of another test
        monkeypatch.syspath_prepend(str(site))

    return make


@pytest.fixture
def moon(install):
    """Install an eviction policy, `moon`, that fails as soon as there is a leaf; return its name."""
    install("moon-plugin", _MOON)
    return "moon"


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
    from sagellm.engines.remote import CoreServer, EngineLock, RunningEngine
    from sagellm.engines.remote.core_process import listen
    from sagellm.engines.remote.messages import Hello
    from sagellm.engines.remote.operations import core_operations

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
