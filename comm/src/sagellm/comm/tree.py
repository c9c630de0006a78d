"""Reads small text files of /proc and /sys below a root folder that tests can choose."""

from __future__ import annotations

from pathlib import Path


def parse_ids(text: str) -> tuple[int, ...]:
    """Read the kernel's list of numbers, `0-3,8`, in increasing order; ValueError if it is not one."""
    ids: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, dash, last = part.partition("-")
            ids.update(range(int(first), int(last if dash else first) + 1))
    return tuple(sorted(ids))


class Tree:
    """The files below one root, and what could not be read from them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.is_this_machine = root == Path("/")
        self.warnings: list[str] = []

    def warn(self, message: str) -> None:
        """Record, once, something that the system did not report."""
        if message not in self.warnings:
            self.warnings.append(message)

    def path(self, path: str) -> Path:
        """Return an absolute path of the machine as a path below the root."""
        return self.root / path.lstrip("/")

    def text(self, path: str) -> str | None:
        """Return a file's content without surrounding whitespace, or None if it cannot be read."""
        try:
            return self.path(path).read_text(errors="replace").strip()
        except OSError:
            return None

    def number(self, path: str) -> int | None:
        """Return a file's content as an integer, or None if it is missing or not an integer."""
        text = self.text(path)
        try:
            return None if text is None else int(text)
        except ValueError:
            return None

    def ids(self, path: str) -> tuple[int, ...] | None:
        """Return a file's list of numbers, or None if it is missing or invalid."""
        text = self.text(path)
        try:
            return None if text is None else parse_ids(text)
        except ValueError:
            return None

    def numbered(self, folder: str, prefix: str) -> tuple[int, ...]:
        """Return the numbers of the entries `prefix<number>` in a folder, in increasing order."""
        try:
            names = [entry.name for entry in self.path(folder).iterdir()]
        except OSError:
            return ()
        suffixes = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        return tuple(sorted(int(suffix) for suffix in suffixes if suffix.isdecimal()))
