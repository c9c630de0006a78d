"""The user's runtime folder: which engines run, and where their sockets are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Self

from sagellm.core import ConfigError, UnknownNameError, nearest
from sagellm.core.runtime_folder import VARIABLE as VARIABLE, runtime_folder as runtime_folder

_CLOCK_SLACK_S = 5.0  # the start of a process is known to ticks, and wall clocks are set
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,40}")


EngineState = Literal["starting", "ready", "draining"]


@dataclass(frozen=True, kw_only=True)
class RunningEngine:
    """What an engine tells about itself in the runtime folder."""

    name: str
    pid: int  # of the front
    url: str
    model: str
    state: EngineState = "ready"

    @property
    def socket(self) -> Path:
        """Where its core listens."""
        return socket_of(self.name)

    @property
    def log(self) -> Path:
        """What it writes to when it runs in the background."""
        return runtime_folder() / f"{self.name}.log"

    @property
    def is_alive(self) -> bool:
        """Whether the process of its front is there."""
        return self.started_s is not None

    @property
    def started_s(self) -> float | None:
        """When the process of its front began, in seconds since 1970; None if it is gone.

        A process that began after the entry was written is another one that got the same number.
        """
        import psutil

        try:
            process = psutil.Process(self.pid)
            started_s = float(process.create_time())
            if process.status() == psutil.STATUS_ZOMBIE:
                return None
        except psutil.NoSuchProcess:
            return None
        except psutil.AccessDenied:
            return 0.0
        try:
            announced_s = _entry_of(self.name).stat().st_mtime
        except FileNotFoundError:
            return started_s
        return started_s if started_s <= announced_s + _CLOCK_SLACK_S else None

    def announce(self) -> None:
        """Write the entry, whole or not at all."""
        path = _entry_of(self.name)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self)), encoding="utf-8")
        partial.replace(path)

    def withdraw(self) -> None:
        """Remove the entry and the socket."""
        _entry_of(self.name).unlink(missing_ok=True)
        self.socket.unlink(missing_ok=True)

    @classmethod
    def all(cls) -> list[Self]:
        """Return the engines that run."""
        return [engine for engine in cls._read_all() if engine.is_alive]

    @classmethod
    def withdraw_dead(cls) -> list[Self]:
        """Remove what engines left behind that ended without a word, and return them."""
        dead = [engine for engine in cls._read_all() if not engine.is_alive]
        for engine in dead:
            engine.withdraw()
        return dead

    @classmethod
    def _read_all(cls) -> Iterator[Self]:
        for path in sorted(runtime_folder().glob("*.json")):
            with suppress(OSError, ValueError, TypeError):  # being written, or not ours
                yield cls(**json.loads(path.read_text(encoding="utf-8")))

    @classmethod
    def find(cls, name: str | None = None) -> Self:
        """Return the engine of a name, or the only one. Raises UnknownNameError with what there is."""
        engines = cls.all()
        if name is not None:
            for engine in engines:
                if engine.name == name:
                    return engine
            known = ", ".join(engine.name for engine in engines) or "none"
            hint = nearest(name, [engine.name for engine in engines])
            raise UnknownNameError(f"no engine {name!r} runs; running: {known}.{hint}")
        if len(engines) == 1:
            return engines[0]
        if not engines:
            raise UnknownNameError("no engine runs; start one with: sage llm engine start")
        known = ", ".join(engine.name for engine in engines)
        raise UnknownNameError(f"{len(engines)} engines run ({known}); choose one with --engine NAME")


def check_name(name: str) -> str:
    """Return an engine's name if it can be a file's. Raises ConfigError."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"engine name {name!r}: letters, digits, '.', '_' and '-', at most 41")
    return name


def socket_of(name: str) -> Path:
    """Return the path of the socket of an engine's core."""
    return runtime_folder() / f"{check_name(name)}.sock"


def _entry_of(name: str) -> Path:
    return runtime_folder() / f"{check_name(name)}.json"
