"""The JSON files of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sagellm.core import CheckpointError

_MAX_BYTES = 64 << 20  # the largest real ones, indices and configs, have a few MiB


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file. Raises CheckpointError if it is unreadable, too long or something else."""
    try:
        check_is_plain(path)
        with open(path, "rb") as file:
            text = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if len(text) > _MAX_BYTES:
        raise CheckpointError(
            f"{path} is too long; a JSON file of a checkpoint has at most {_MAX_BYTES} bytes"
        )
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:  # bad JSON, or bytes that are no text
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a JSON {type(content).__name__}; it must be an object")
    return content


def read_optional_json(path: Path) -> dict[str, Any]:
    """Return the object in a file, or an empty one if there is no such file."""
    return read_json(path) if path.exists() else {}


def check_is_plain(path: Path) -> None:
    """Raise CheckpointError for what is there but no plain file: a pipe or a device may never end."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} cannot be read: it is no plain file")
