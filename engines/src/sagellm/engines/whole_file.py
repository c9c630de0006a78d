"""Files that get their name only once complete."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield the path to write to; after an error, it is removed and an older file is unchanged.

    The path is a temporary one in the same folder, with the same suffix, that is renamed at the end. A pipe,
    a device, and a file in a folder where none can be created are written in place.
    """
    target = path.resolve()  # a link keeps pointing to its file
    if (target.exists() and not target.is_file()) or not os.access(target.parent, os.W_OK):
        yield path
        return
    partial = target.with_name(f".partial-{secrets.token_hex(4)}{target.suffix}")
    try:
        yield partial
        if target.exists():
            partial.chmod(target.stat().st_mode)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
