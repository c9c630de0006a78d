"""A file of lines that is renamed when it is full, while the oldest ones are removed."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path


class RotatingFile:
    """Appends lines to FILE (mode 0600); a full one becomes FILE.1, that one FILE.2 and so on.

    There are at most `max_files`, each of at most `max_bytes` or of one longer line. A FILE that exists is
    kept in the same way; a device is written as it is. Each file begins with `head`. Every call may raise
    OSError; then the file ends with its last whole line.
    """

    def __init__(self, path: Path, head: bytes, *, max_bytes: int, max_files: int) -> None:
        self._path, self._head = path, head
        self._max_bytes, self._max_files = max_bytes, max_files
        self._is_file = not path.exists() or stat.S_ISREG(path.stat().st_mode)
        self._descriptor, self._size = -1, 0
        self.num_bytes = 0  # in all files
        self._open()

    def write(self, line: bytes) -> None:
        """Append a line, which has its end."""
        is_full = self._size + len(line) > self._max_bytes and self._size > len(self._head)
        if self._is_file and is_full:
            self.close()
            self._open()
        self._append(line)

    def close(self) -> None:
        """Close the file. Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
        if self._is_file:
            self._keep_older()
            flags |= os.O_CREAT | os.O_EXCL
        self._descriptor, self._size = os.open(self._path, flags, 0o600), 0
        self._append(self._head)

    def _keep_older(self) -> None:
        """Give each file the next number; the last one is overwritten."""
        older = [self._path.with_name(f"{self._path.name}.{number}") for number in range(1, self._max_files)]
        names = [self._path, *older]
        for source, target in reversed(list(zip(names, older, strict=False))):
            with suppress(FileNotFoundError):
                source.replace(target)

    def _append(self, line: bytes) -> None:
        num_written = 0
        try:
            while num_written < len(line):
                num_written += os.write(self._descriptor, line[num_written:])
        except OSError:
            if self._is_file and num_written:
                with suppress(OSError):
                    os.ftruncate(self._descriptor, self._size)
            raise
        self._size += len(line)
        self.num_bytes += len(line)
