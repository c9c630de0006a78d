"""Which GGUF file a path stands for, and the parts of a model that llama.cpp has split."""

from __future__ import annotations

import re
from pathlib import Path

SUFFIX = ".gguf"
_PART = re.compile(r"(?P<name>.+)-\d{5}-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_MAX_PARTS = 1000


def gguf_in(path: Path) -> Path | None:
    """Return the GGUF file that a path stands for, of one in parts the first, or None.

    A directory stands for its only one, if it has no safetensors.
    """
    if not path.is_dir():
        return path if path.suffix.lower() == SUFFIX else None
    try:
        names = sorted(file.name for file in path.iterdir())
    except OSError:
        return None
    files = [name for name in names if name.lower().endswith(SUFFIX)]
    if not files or any(name.endswith(".safetensors") for name in names):
        return None
    return path / files[0] if len(files) == 1 or files == parts_of(files[0]) else None


def parts_of(name: str) -> list[str]:
    """Return the names of all files of a model in parts, by that of one of them."""
    match = _PART.fullmatch(name)
    if match is None or not 1 <= int(match["count"]) <= _MAX_PARTS:
        return [name]
    suffix = name[-len(SUFFIX) :]
    count = match["count"]
    return [f"{match['name']}-{number + 1:05}-of-{count}{suffix}" for number in range(int(count))]
