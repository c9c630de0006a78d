"""The JSON files of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sagellm.core import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file. Raises CheckpointError if it is unreadable or something else."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # bad JSON, or bytes that are no text
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a JSON {type(content).__name__}; it must be an object")
    return content


def read_optional_json(path: Path) -> dict[str, Any]:
    """Return the object in a file, or an empty one if there is no such file."""
    return read_json(path) if path.exists() else {}
