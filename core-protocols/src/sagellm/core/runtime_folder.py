"""The user's runtime folder: sockets and entries of running engines, and the key of stored KV."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from sagellm.core.errors import ConfigError

VARIABLE = "SAGELLM_RUNTIME_DIR"


def runtime_folder() -> Path:
    """Return the folder, as `own_folder` does. Raises ConfigError."""
    given, system = os.environ.get(VARIABLE), os.environ.get("XDG_RUNTIME_DIR")
    if given:
        folder = Path(given)
    elif system and Path(system).is_dir():
        folder = Path(system) / "sagellm"
    else:
        folder = Path(tempfile.gettempdir()) / f"sagellm-{os.getuid()}"
    return own_folder(folder)


def own_folder(folder: Path) -> Path:
    """Return a folder that only its owner can read, creating it if necessary.

    Raises ConfigError if it cannot be created, or if somebody else owns it or may write to it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.lstat()
    except OSError as error:
        raise ConfigError(
            f"the runtime folder {folder} cannot be made: {error.strerror}; name another in {VARIABLE}"
        ) from error
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid() or state.st_mode & 0o077:
        raise ConfigError(
            f"the runtime folder {folder} must be yours alone: chmod 700 it, or name another in {VARIABLE}"
        )
    return folder
