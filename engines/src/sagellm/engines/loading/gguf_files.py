"""Which GGUF file a path stands for, and the parts of a model that llama.cpp has split."""

from __future__ import annotations

import re
from pathlib import Path

SUFFIX = ".gguf"
_PART = re.compile(r"(?P<name>.+)-\d{5}-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_MAX_PARTS = 1000


def gguf_in(path: Path) -> Path | None:
    """Return the GGUF file that a path stands for, of one in parts the first, or None."""
    if not path.is_dir():
        return path if path.suffix.lower() == SUFFIX else None
    files = sorted(file for file in path.iterdir() if file.suffix.lower() == SUFFIX)
    if not files or any(path.glob("*.safetensors")):
        return None
    parts = parts_of(files[0].name)
    return files[0] if [file.name for file in files] == parts or len(files) == 1 else None


def parts_of(name: str) -> list[str]:
    """Return the names of all files of a model in parts, by that of one of them."""
    match = _PART.fullmatch(name)
    if match is None or not 1 <= int(match["count"]) <= _MAX_PARTS:
        return [name]
    suffix = name[-len(SUFFIX) :]
    count = match["count"]
    return [f"{match['name']}-{number + 1:05}-of-{count}{suffix}" for number in range(int(count))]
