"""Clock, randomness and files, injected so that everything can run on virtual time and be replayed.

Scheduler, KV management, tiers and transfer use only their Runtime for these.
"""

from __future__ import annotations

import errno
import os
import random
import stat
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from sagellm.core.chaos import flaky
from sagellm.core.errors import InvalidInputError
from sagellm.core.random_access import MemoryRandomAccessFile, RandomAccessFile, SystemRandomAccessFile


class Clock(ABC):
    """Tells the time. Durations come from `now_ns`; wall time only labels records."""

    @abstractmethod
    def now_ns(self) -> int:
        """Return monotonic nanoseconds since an arbitrary start."""

    @abstractmethod
    def wall_s(self) -> float:
        """Return seconds since 1970, only for labels."""

    @abstractmethod
    def sleep_ns(self, duration_ns: int) -> None:
        """Make this thread wait. Raises InvalidInputError for a negative duration."""


class SystemClock(Clock):
    """The machine's own monotonic clock."""

    now_ns = staticmethod(time.perf_counter_ns)  # read several times a step, so without a call in between

    def wall_s(self) -> float:
        """Return `time.time()`."""
        return time.time()

    def sleep_ns(self, duration_ns: int) -> None:
        """Sleep, letting other threads run."""
        if duration_ns < 0:
            raise InvalidInputError(f"cannot sleep for {duration_ns} ns")
        time.sleep(duration_ns / 1e9)


class VirtualClock(Clock):
    """A clock that moves only when advanced."""

    def __init__(self, start_ns: int = 0, wall_start_s: float = 0.0) -> None:
        self._now_ns = start_ns
        self._wall_start_s = wall_start_s - start_ns / 1e9

    def now_ns(self) -> int:
        """Return the virtual time."""
        return self._now_ns

    def wall_s(self) -> float:
        """Return the virtual time as seconds since the virtual 1970."""
        return self._wall_start_s + self._now_ns / 1e9

    def sleep_ns(self, duration_ns: int) -> None:
        """Advance the time."""
        self.advance_ns(duration_ns)

    def advance_ns(self, duration_ns: int) -> None:
        """Advance the time. Raises InvalidInputError for a negative duration."""
        if duration_ns < 0:
            raise InvalidInputError(f"time cannot go back by {-duration_ns} ns")
        self._now_ns += duration_ns


class Randomness:
    """Independent streams of random numbers, all from one seed, each by name."""

    def __init__(self, seed: int | None = None) -> None:
        self.seed = int.from_bytes(os.urandom(8), "little") if seed is None else seed

    def stream(self, name: str) -> random.Random:
        """Return a new generator that depends on the seed and the name alone."""
        digest = blake2b(f"{self.seed}/{name}".encode(), digest_size=16).digest()
        return random.Random(int.from_bytes(digest, "little"))


class Files(ABC):
    """The few file operations that tiers and traces need. Missing files raise FileNotFoundError."""

    @abstractmethod
    def read(self, path: str, offset: int = 0, size: int | None = None) -> bytes:
        """Return `size` bytes from `offset`, fewer at the end of the file."""

    @abstractmethod
    def write(self, path: str, data: bytes) -> None:
        """Replace a file atomically: after a crash it has the old bytes or the new ones. Mode 0600."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Delete a file."""

    @abstractmethod
    def rename(self, old: str, new: str) -> None:
        """Rename a file, replacing any other; after a crash the new name has all of one of them."""

    @abstractmethod
    def size(self, path: str) -> int:
        """Return the length of a file in bytes."""

    @abstractmethod
    def open(self, path: str, *, is_new: bool) -> RandomAccessFile:
        """Open a file for access in place; a new one must not exist yet. Mode 0600."""

    @abstractmethod
    def list(self, folder: str) -> list[str]:
        """Return the sorted names in a folder."""


class SystemFiles(Files):
    """The machine's file system."""

    @flaky("files.read", errno.EIO)
    def read(self, path: str, offset: int = 0, size: int | None = None) -> bytes:
        """Read a part of a file."""
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(-1 if size is None else size)

    @flaky("files.write", errno.ENOSPC, errno.EIO)
    def write(self, path: str, data: bytes) -> None:
        """Write beside the target, flush to the device, then rename over it."""
        temporary = f"{path}.{os.getpid()}.tmp"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            with open(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    @flaky("files.remove", errno.EIO, rate=10, num_spared=1)
    def remove(self, path: str) -> None:
        """Delete a file."""
        os.unlink(path)

    @flaky("files.rename", errno.EIO, errno.ENOSPC, rate=10)
    def rename(self, old: str, new: str) -> None:
        """Flush to the device, then rename."""
        descriptor = os.open(old, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(old, new)

    def size(self, path: str) -> int:
        """Ask the system; anything other than a regular file counts as missing."""
        found = os.lstat(path)
        if not stat.S_ISREG(found.st_mode):
            raise FileNotFoundError(errno.ENOENT, "not a regular file", path)
        return found.st_size

    @flaky("files.open", errno.EMFILE, errno.EIO, rate=10, num_spared=1)
    def open(self, path: str, *, is_new: bool) -> RandomAccessFile:
        """Open a file on this machine; never follows a link."""
        return SystemRandomAccessFile(path, is_new=is_new)

    @flaky("files.list", errno.EIO, errno.EMFILE, rate=10)
    def list(self, folder: str) -> list[str]:
        """List a folder."""
        return sorted(os.listdir(folder))


class MemoryFiles(Files):
    """Files that live in a dict, for simulations and tests."""

    def __init__(self) -> None:
        self._data: dict[str, bytes | bytearray] = {}

    def read(self, path: str, offset: int = 0, size: int | None = None) -> bytes:
        """Read a part of a file."""
        try:
            data = self._data[path]
        except KeyError:
            raise FileNotFoundError(path) from None
        return bytes(data[offset:] if size is None else data[offset : offset + size])

    def write(self, path: str, data: bytes) -> None:
        """Keep a copy of the bytes."""
        self._data[path] = bytes(data)

    def remove(self, path: str) -> None:
        """Forget a file."""
        if self._data.pop(path, None) is None:
            raise FileNotFoundError(path)

    def rename(self, old: str, new: str) -> None:
        """Move the bytes."""
        try:
            self._data[new] = self._data.pop(old)
        except KeyError:
            raise FileNotFoundError(old) from None

    def size(self, path: str) -> int:
        """Return how many bytes it has."""
        try:
            return len(self._data[path])
        except KeyError:
            raise FileNotFoundError(path) from None

    def open(self, path: str, *, is_new: bool) -> RandomAccessFile:
        """Open a file that stays here when closed."""
        if is_new and path in self._data:
            raise FileExistsError(path)
        if not is_new and path not in self._data:
            raise FileNotFoundError(path)
        data = self._data[path] = bytearray(self._data.get(path, b""))
        return MemoryRandomAccessFile(data)

    def list(self, folder: str) -> list[str]:
        """List the names directly below a folder."""
        prefix = folder.rstrip("/") + "/"
        return sorted({path[len(prefix) :].split("/")[0] for path in self._data if path.startswith(prefix)})


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Everything that would make a run differ from its replay."""

    clock: Clock
    randomness: Randomness
    files: Files

    @classmethod
    def system(cls, *, seed: int | None = None) -> Runtime:
        """Make the runtime of a real process."""
        return cls(clock=SystemClock(), randomness=Randomness(seed), files=SystemFiles())

    @classmethod
    def virtual(cls, *, seed: int = 0) -> Runtime:
        """Make a runtime on virtual time with files in memory."""
        return cls(clock=VirtualClock(), randomness=Randomness(seed), files=MemoryFiles())
