"""Files read and written in place, injected like every other source of nondeterminism."""

from __future__ import annotations

import errno
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from sagellm.core.chaos import flaky_vector

_NOWAIT = getattr(os, "RWF_NOWAIT", None)
_system_preadv: Any = getattr(os, "preadv", None)  # not on Windows
_system_pwritev: Any = getattr(os, "pwritev", None)
_preadv = flaky_vector("file.read", errno.EIO)(_system_preadv)
_pwritev = flaky_vector("file.write", errno.EIO, errno.ENOSPC)(_system_pwritev)


class RandomAccessFile(ABC):
    """One open file. Every method may raise OSError."""

    @abstractmethod
    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> int:
        """Fill buffers one after the other from `offset`; return how many bytes, fewer at the end."""

    @abstractmethod
    def write(self, offset: int, buffers: Sequence[bytes | memoryview]) -> None:
        """Write all buffers one after the other from `offset`."""

    @abstractmethod
    def size(self) -> int:
        """Return the length of the file in bytes."""

    @abstractmethod
    def truncate(self, size: int) -> None:
        """Cut the file after this many bytes; a shorter file is unchanged."""

    @abstractmethod
    def is_resident(self, offset: int, size: int) -> bool:
        """Say whether a range can be read from memory, without the device. A guess from its ends."""

    @abstractmethod
    def close(self) -> None:
        """Close it. Idempotent."""


class SystemRandomAccessFile(RandomAccessFile):
    """A file on this machine, mode 0600, for this user only.

    Raises PermissionError if it exists and is not the user's own regular file with only this name.
    """

    _descriptor = -1

    def __init__(self, path: str, *, is_new: bool) -> None:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if is_new else 0)
        # without O_NONBLOCK, opening what is not a regular file may block forever
        careful = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        self._descriptor = os.open(path, flags | careful, 0o600)
        try:
            _make_private(self._descriptor)
        except OSError:
            self.close()
            raise

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> int:
        """Read until all buffers are full or the file ends."""
        num_read, left = 0, [buffer for buffer in buffers if len(buffer)]
        while left and (count := _preadv(self._descriptor, left, offset + num_read)):
            num_read += count
            left = _rest(left, count)
        return num_read

    def write(self, offset: int, buffers: Sequence[bytes | memoryview]) -> None:
        """Write until all is written."""
        left = [memoryview(buffer) for buffer in buffers if len(buffer)]
        while left:
            count = _pwritev(self._descriptor, left, offset)
            if count == 0:
                raise OSError(errno.EIO, "nothing was written")
            offset += count
            left = _rest(left, count)

    def size(self) -> int:
        """Ask the system."""
        return os.fstat(self._descriptor).st_size

    def truncate(self, size: int) -> None:
        """Truncate it."""
        if self.size() > size:
            os.ftruncate(self._descriptor, size)

    def is_resident(self, offset: int, size: int) -> bool:
        """Try to read the first and the last byte without waiting; False if the system cannot say."""
        if _NOWAIT is None or size < 1:
            return False
        byte = bytearray(1)
        try:
            return all(
                os.preadv(self._descriptor, [byte], position, _NOWAIT) == 1
                for position in (offset, offset + size // 2, offset + size - 1)
            )
        except OSError:  # it would block, or the file system does not support the flag
            return False

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptor."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with suppress(OSError):
                os.close(descriptor)


class MemoryRandomAccessFile(RandomAccessFile):
    """A file that is a bytearray, for simulations and tests."""

    def __init__(self, data: bytearray) -> None:
        self._data = data

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> int:
        """Copy."""
        num_read = 0
        for buffer in buffers:
            part = self._data[offset + num_read : offset + num_read + len(buffer)]
            buffer[: len(part)] = part
            num_read += len(part)
        return num_read

    def write(self, offset: int, buffers: Sequence[bytes | memoryview]) -> None:
        """Copy; holes read as zeros."""
        data = b"".join(buffers)
        if len(self._data) < offset:
            self._data.extend(bytes(offset - len(self._data)))
        self._data[offset : offset + len(data)] = data

    def size(self) -> int:
        """Return its length."""
        return len(self._data)

    def truncate(self, size: int) -> None:
        """Truncate it."""
        del self._data[size:]

    def is_resident(self, offset: int, size: int) -> bool:
        """Say yes."""
        return True

    def close(self) -> None:
        """Do nothing."""


def _make_private(descriptor: int) -> None:
    """Make a file private, in case others may read it. Raises PermissionError if it is not the user's own."""
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise PermissionError(errno.EPERM, "it is not a regular file")
    if hasattr(os, "geteuid") and found.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"it belongs to user {found.st_uid}")
    if found.st_nlink > 1:
        raise PermissionError(errno.EPERM, "it has a second name, a hard link")
    if hasattr(os, "fchmod") and stat.S_IMODE(found.st_mode) & 0o177:
        os.fchmod(descriptor, 0o600)


def _rest(buffers: Sequence[memoryview], num_done: int) -> list[memoryview]:
    """Return what is left of buffers after this many bytes."""
    rest = []
    for buffer in buffers:
        if num_done >= len(buffer):
            num_done -= len(buffer)
        else:
            rest.append(buffer[num_done:])
            num_done = 0
    return rest
