"""The folder of saved prefix caches: names in, never paths."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from sagellm.core.errors import InvalidInputError, nearest
from sagellm.core.runtime import Files

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_SUFFIX = ".kv"
_UNFINISHED = re.compile(_NAME.pattern + r"\.(\d+)-\d+\.kv")
_numbers = count()


class SaveFolder:
    """Files of tiers by name, at most `max_bytes` in total."""

    def __init__(self, path: Path, files: Files, max_bytes: int) -> None:
        self.path, self._files, self._max_bytes = path, files, max_bytes

    def names(self) -> list[str]:
        """Return what can be loaded."""
        found = self._listed()
        names = [each[: -len(_SUFFIX)] for each in found if each.endswith(_SUFFIX)]
        return [name for name in names if _NAME.fullmatch(name) and self.size(name) is not None]

    def size(self, name: str) -> int | None:
        """Return the bytes of a save; None if it is missing or not a regular file (folder, link, pipe)."""
        try:
            return self._files.size(self._path_of(name))
        except OSError:
            return None

    def check_name(self, name: str) -> None:
        """Raise InvalidInputError for an invalid name."""
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidInputError(
                f"a save is called {name!r}; give at most 64 letters, digits, '_' and '-', no path"
            )

    def find(self, name: str) -> None:
        """Raise InvalidInputError for an invalid or unknown name."""
        self.check_name(name)
        names = self.names()
        if name not in names:
            known = ", ".join(names) or "nothing"
            raise InvalidInputError(
                f"there is no save {name!r} in {self.path}; saved: {known}.{nearest(name, names)}"
            )

    def remove(self, name: str) -> int:
        """Delete a save and return its size in bytes. Raises InvalidInputError if that fails."""
        self.find(name)
        num_bytes = self.size(name) or 0
        try:
            self._files.remove(self._path_of(name))
        except OSError as error:
            raise InvalidInputError(
                f"the save {name!r} in {self.path} cannot be deleted: {error.strerror}"
            ) from None
        return num_bytes

    @contextmanager
    def new(self, name: str, num_bytes: int) -> Iterator[str]:
        """Yield a temporary name to write a save under; the file is deleted if it is not finished.

        Raises InvalidInputError if there is no room for this many bytes.
        """
        if self.size(name) is None and f"{name}{_SUFFIX}" in self._listed():
            raise InvalidInputError(f"{name}{_SUFFIX} in {self.path} is not a file; choose another name")
        used = sum(self.size(each) or 0 for each in self.names() if each != name)
        if used + num_bytes > self._max_bytes:
            raise InvalidInputError(
                f"the save {name!r} takes up to {num_bytes:,} bytes, {used:,} of at most {self._max_bytes:,} "
                f"in {self.path} are taken; delete some of them, or raise kv.max_saved"
            )
        self._remove_abandoned()
        unfinished = f"{name}.{os.getpid()}-{next(_numbers)}"
        try:
            yield unfinished
        finally:
            with suppress(FileNotFoundError):
                self._files.remove(self._path_of(unfinished))

    def finish(self, unfinished: str, name: str) -> None:
        """Give a complete save its name, replacing any previous save of that name."""
        self._files.rename(self._path_of(unfinished), self._path_of(name))

    def _listed(self) -> list[str]:
        try:
            return self._files.list(str(self.path))
        except FileNotFoundError:
            return []

    def _remove_abandoned(self) -> None:
        """Delete the unfinished files of processes that have ended."""
        for file in self._listed():
            found = _UNFINISHED.fullmatch(file)
            if found and not _is_alive(int(found[1])):
                with suppress(OSError):
                    self._files.remove(str(self.path / file))

    def _path_of(self, name: str) -> str:
        return str(self.path / f"{name}{_SUFFIX}")


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
