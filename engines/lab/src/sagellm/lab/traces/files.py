"""Text files, compressed or not, by their extension."""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

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
