"""A file of lines that is renamed when it is full, while the oldest ones are removed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


class RotatingFile:
    """Appends lines to FILE (mode 0600); a full one becomes FILE.1, that one FILE.2 and so on.

    There are at most `max_files`, each of at most `max_bytes` or of one longer line. A FILE that exists is
    kept in the same way; a device or a pipe is written as it is. Each file begins with `head`. Every call may
    raise OSError; then the file ends with its last whole line.
    """

    def __init__(self, path: Path, head: bytes, *, max_bytes: int, max_files: int) -> None:
        self._path, self._head = path, head
        self._max_bytes, self._max_files = max_bytes, max_files
        self._is_file = not path.exists() or stat.S_ISREG(path.stat().st_mode)
        self._descriptor, self._size = -1, 0
        self.num_bytes = 0  # in all files
        self.num_lines = 0  # without the heads
        self._open()

    def write(self, lines: Iterable[bytes]) -> None:
        """Append lines, which have their ends, with few calls of the system."""
        batch: list[bytes] = []
        num_bytes = 0
        for line in lines:
            if self._is_file and self._size + num_bytes + len(line) > self._max_bytes:
                self._append(b"".join(batch))
                batch, num_bytes = [], 0
                if self._size > len(self._head):
                    self.close()
                    self._open()
            batch.append(line)
            num_bytes += len(line)
        self._append(b"".join(batch))

    def close(self) -> None:
        """Close the file. Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _open(self) -> None:
        flags = (
            os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
        )  # a pipe without a reader is an error
        if self._is_file:
            self._keep_older()
            flags |= os.O_CREAT | os.O_EXCL
        self._descriptor, self._size = os.open(self._path, flags, 0o600), 0
        os.set_blocking(self._descriptor, True)
        self._append(self._head)
        self.num_lines -= 1

    def _keep_older(self) -> None:
        """Give each file the next number; the last one is overwritten."""
        older = [self._path.with_name(f"{self._path.name}.{number}") for number in range(1, self._max_files)]
        names = [self._path, *older]
        for source, target in reversed(list(zip(names, older, strict=False))):
            with suppress(FileNotFoundError):
                source.replace(target)

    def _append(self, data: bytes) -> None:
        """Write whole lines; if that fails, those that were written whole stay."""
        num_written = 0
        try:
            while num_written < len(data):
                num_written += os.write(self._descriptor, data[num_written:] if num_written else data)
        except OSError:
            num_written = data.rfind(b"\n", 0, num_written) + 1
            if self._is_file:
                with suppress(OSError):
                    os.ftruncate(self._descriptor, self._size + num_written)
            raise
        finally:
            self._size += num_written
            self.num_bytes += num_written
            self.num_lines += data.count(b"\n", 0, num_written)
