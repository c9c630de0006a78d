"""The JSON files of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sagellm.core import CheckpointError, ConfigError
from sagellm.engines.config.bounded_json import MAX_VALUES, parse_json

CONFIG_BYTES = 4 << 20  # the largest real ones have a few hundred KiB
INDEX_BYTES = 32 << 20  # for tens of thousands of experts
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
# JSON has no such numbers; transformers writes {"__float__": "Infinity"}.
_SPECIAL_FLOATS = {name: float(name) for name in ("Infinity", "-Infinity", "NaN")}


def read_json(path: Path, max_bytes: int = CONFIG_BYTES, max_values: int = MAX_VALUES) -> dict[str, Any]:
    """Return the object in a file.

    Raises CheckpointError if it cannot be read, is too long or exceeds a limit of `parse_json`.
    """
    try:
        check_file(path)
        with open(path, "rb") as file:
            text = file.read(max_bytes + 1)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if len(text) > max_bytes:
        raise CheckpointError(
            f"{path} is longer than {max_bytes} bytes, which no such file of a real checkpoint is"
        )
    try:
        content = parse_json(text, max_values=max_values, object_hook=_decode_special_float)
    except ConfigError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a JSON {type(content).__name__}; it must be an object")
    return content


def read_optional_json(
    path: Path, max_bytes: int = CONFIG_BYTES, max_values: int = MAX_VALUES
) -> dict[str, Any]:
    """Return the object in a file, or an empty one if there is no such file."""
    return read_json(path, max_bytes, max_values) if path.exists() else {}


def check_file(path: Path) -> None:
    """Raise CheckpointError for a pipe or a device, which may never end, and for a Git LFS pointer.

    A missing file passes.
    """
    if not path.exists():
        return
    if not path.is_file():
        raise CheckpointError(f"{path} cannot be read: it is not a regular file")
    with open(path, "rb") as file:
        start = file.read(len(_LFS_POINTER))
    if start == _LFS_POINTER:
        raise CheckpointError(
            f"{path} is a Git LFS pointer, which stands for the file itself; run `git lfs pull` in its "
            f"repository, or download the file"
        )


def _decode_special_float(value: dict[str, Any]) -> Any:
    name = value.get("__float__")
    return _SPECIAL_FLOATS.get(name, value) if len(value) == 1 and isinstance(name, str) else value
