"""The engines in the user's runtime folder: their entries, locks, sockets and logs.

An engine's process holds a lock on NAME.lock until it ends, for whatever reason. So liveness depends on no
clock, and a reused process id is never mistaken for the engine.

Whatever else stands in the folder is not trusted: anything that is not a valid entry, or not a regular file
of this user, is logged once and skipped, and reading never blocks.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal, Self

import msgspec

from sagellm.core import ConfigError, InvalidInputError, UnknownNameError, get_logger, nearest
from sagellm.core.chaos import flaky
from sagellm.core.runtime_folder import runtime_folder

logger = get_logger(__name__)

_LOCK_WAIT_S = 0.5  # a process that checks whether an engine is alive holds its lock for a moment
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,40}")
_MAX_ENTRY_BYTES = 64 << 10
_CAREFUL = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe must not make its reader wait


EngineState = Literal["starting", "ready", "draining", "stopped"]


class EngineLock:
    """The exclusive right to an engine's name, until `release` or the end of this process.

    Forked children share it; executed programs do not inherit it.
    """

    def __init__(self, name: str) -> None:
        """Take the lock. Raises ConfigError if an engine of this name runs, or the file cannot be locked."""
        deadline = time.monotonic() + _LOCK_WAIT_S
        try:
            while (descriptor := _try_lock(name)) is None:
                if time.monotonic() > deadline:
                    raise ConfigError(f"an engine {name!r} runs already; choose another --name")
                time.sleep(_LOCK_WAIT_S / 50)
        except OSError as error:
            raise ConfigError(f"{_lock_of(name)} cannot be locked ({error.strerror}); remove it") from error
        self._name, self._descriptor = name, descriptor

    def release(self) -> None:
        """Remove the engine's entry, its socket and the lock. Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            try:
                _remove(self._name)
            finally:
                os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@dataclass(frozen=True, kw_only=True)
class RunningEngine:
    """An engine's entry in the runtime folder; its process holds the EngineLock of its name."""

    name: str
    pid: Annotated[int, msgspec.Meta(ge=1)]  # of the front
    url: str
    model: str
    state: EngineState = "ready"
    started_s: float = field(default_factory=time.monotonic)  # on the clock that all processes share

    @property
    def socket(self) -> Path:
        """The path of its core's socket."""
        return socket_of(self.name)

    @property
    def log(self) -> Path:
        """The path of its log when it runs in the background."""
        return runtime_folder() / f"{self.name}.log"

    @property
    def is_alive(self) -> bool:
        """Whether its front's process is running."""
        path = _lock_of(self.name)
        try:
            descriptor = os.open(path, os.O_RDWR | _CAREFUL)
        except FileNotFoundError:
            return False
        except OSError as error:
            _say_once(path, error.strerror or str(error))
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared, so that checks do not conflict
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            return True
        finally:
            os.close(descriptor)
        return False

    @property
    def uptime_s(self) -> float:
        """Seconds since it was started."""
        return max(0.0, time.monotonic() - self.started_s)

    @flaky("runtime_folder.announce", errno.ENOSPC, rate=10, num_spared=1)
    def announce(self) -> None:
        """Write the entry atomically. Raises OSError."""
        path = _entry_of(self.name)
        partial = path.with_suffix(".partial")
        partial.unlink(missing_ok=True)
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _CAREFUL, 0o600), "wb") as file:
            file.write(msgspec.json.encode(self))
        partial.replace(path)

    @classmethod
    def all(cls) -> list[Self]:
        """Return the running engines."""
        read = [cls._read(path) for path in _entries()]
        return [engine for engine in read if engine is not None and engine.is_alive]

    @classmethod
    def withdraw_dead(cls) -> list[Self]:
        """Remove the files of engines that ended without cleaning up, and return those engines.

        This user's regular files that are not valid entries, and no running engine's, are removed too.
        """
        dead = []
        for path in _entries():
            engine = cls._read(path)
            if not _NAME.fullmatch(path.stem):
                continue
            with suppress(OSError):  # it is gone, or its lock is unusable, which `is_alive` logs
                if not _is_own_file(path):
                    continue
                descriptor = _try_lock(path.stem)  # so that no engine of this name starts meanwhile
                if descriptor is None:
                    continue
                try:
                    if engine is not None and path.exists():
                        dead.append(engine)
                    _remove(path.stem)
                finally:
                    os.close(descriptor)
        return dead

    @classmethod
    def _read(cls, path: Path) -> Self | None:
        """Return the engine of an entry, or None, which is logged once unless the file is gone."""
        try:
            engine = msgspec.json.decode(_read_own_file(path), type=cls)
            if engine.name != path.stem or not _NAME.fullmatch(engine.name):
                raise InvalidInputError(f"it has the name {engine.name!r}")
        except FileNotFoundError:
            return None
        except (
            OSError,
            InvalidInputError,
            msgspec.MsgspecError,
            RecursionError,
            UnicodeDecodeError,
        ) as error:
            _say_once(path, str(error))
            return None
        return engine

    @classmethod
    def find(cls, name: str | None = None) -> Self:
        """Return the engine with this name, or the only one. Raises UnknownNameError, which lists them."""
        engines = cls.all()
        if name is not None:
            for engine in engines:
                if engine.name == name:
                    return engine
            known = ", ".join(engine.name for engine in engines) or "none"
            hint = nearest(name, [engine.name for engine in engines])
            raise UnknownNameError(f"no engine {name!r} is running; running: {known}.{hint}")
        if len(engines) == 1:
            return engines[0]
        if not engines:
            raise UnknownNameError("no engine runs; start one with: sage llm engine start")
        known = ", ".join(engine.name for engine in engines)
        raise UnknownNameError(f"{len(engines)} engines run ({known}); choose one with --engine NAME")


def check_name(name: str) -> str:
    """Return an engine's name if it can be a file's. Raises ConfigError."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"the engine's name is {name!r}; it must be at most 41 letters, digits, '.', '_' and '-', and "
            f"start with a letter or digit"
        )
    return name


def socket_of(name: str) -> Path:
    """Return the path of the socket of an engine's core."""
    return runtime_folder() / f"{check_name(name)}.sock"


def _entries() -> list[Path]:
    return sorted(runtime_folder().glob("*.json"))


def _read_own_file(path: Path) -> bytes:
    """Return the content of a regular file of ours, without waiting. Raises OSError, InvalidInputError."""
    if not _is_own_file(path):
        raise InvalidInputError("it is not a regular file, or it belongs to another user")
    descriptor = os.open(path, os.O_RDONLY | _CAREFUL)
    try:
        data = os.read(descriptor, _MAX_ENTRY_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(data) > _MAX_ENTRY_BYTES:
        raise InvalidInputError(f"it has more than {_MAX_ENTRY_BYTES} bytes")
    return data


def _is_own_file(path: Path) -> bool:
    """Say whether a file is a regular one of ours. Raises FileNotFoundError."""
    found = path.lstat()
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid()


@lru_cache(256)
def _say_once(path: Path, reason: str) -> None:
    logger.warning("ignoring %s, which is not an engine's file: %s", path, reason)


def _entry_of(name: str) -> Path:
    return runtime_folder() / f"{check_name(name)}.json"


def _lock_of(name: str) -> Path:
    return runtime_folder() / f"{check_name(name)}.lock"


def _try_lock(name: str) -> int | None:
    """Lock an engine's name and return the descriptor that holds the lock, or None if it is held."""
    path = _lock_of(name)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _CAREFUL, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except FileNotFoundError:
            pass  # its last holder removed the file after we opened it; create a new one
        except OSError as error:
            os.close(descriptor)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            return None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


@flaky("runtime_folder.remove")
def _remove(name: str) -> None:
    """Remove an engine's files; the caller holds its lock."""
    for path in (_entry_of(name), socket_of(name), _lock_of(name)):
        with suppress(IsADirectoryError):
            path.unlink(missing_ok=True)
