"""Files that the lab reads and writes: text, compressed or not by the extension, and JSON."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

from sagellm.core import ConfigError
from sagellm.engines.whole_file import whole_file

_OPENERS: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open, ".bz2": bz2.open}

PackingError = lzma.LZMAError
"""Raised for a file that is not compressed as its name says, besides OSError and EOFError."""


def open_text(path: Path, mode: str = "r") -> IO[str]:
    """Open a file, `r` or `w`."""
    encoding = "utf-8-sig" if mode == "r" else "utf-8"
    opened: IO[str] = _OPENERS.get(path.suffix, open)(path, f"{mode}t", encoding=encoding)
    return opened


def plain_name(path: Path) -> str:
    """Return the name without the compression suffix."""
    return path.name.removesuffix(path.suffix) if path.suffix in _OPENERS else path.name


def write_json(path: Path, value: Any, what: str, *, indent: int | None = 1) -> None:
    """Write one value. Raises ConfigError, which names `what` it is, if the file cannot be written."""
    text = json.dumps(value, indent=indent, ensure_ascii=False, default=str) + "\n"
    with _told(path, what), whole_file(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def write_json_lines(path: Path, rows: Iterable[Any], what: str, *, is_packed: bool = False) -> None:
    """Write one row a line, compressed if `is_packed` and the extension says so.

    Raises ConfigError, which names `what` they are, if the file cannot be written.
    """
    opened = open_text if is_packed else partial(Path.open, encoding="utf-8")
    with _told(path, what), whole_file(path) as unfinished, opened(unfinished, "w") as file:
        file.writelines(json.dumps(row, separators=(",", ":"), ensure_ascii=False) + "\n" for row in rows)


def write_text_lines(path: Path, lines: Iterable[str], what: str) -> None:
    """Write lines of text, compressed if the extension says so.

    Raises ConfigError, which names `what` they are, if the file cannot be written.
    """
    with _told(path, what), whole_file(path) as unfinished, open_text(unfinished, "w") as file:
        file.writelines(line + "\n" for line in lines)


@contextmanager
def _told(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"the {what} cannot be written to {path}") from error
