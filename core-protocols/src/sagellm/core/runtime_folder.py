"""The user's runtime folder: sockets and entries of running engines, and the key of stored KV."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from sagellm.core.errors import ConfigError

VARIABLE = "SAGELLM_RUNTIME_DIR"


def runtime_folder() -> Path:
    """Return the folder, created with mode 0700 if missing.

    Raises ConfigError if another user owns it or has any access to it.
    """
    given, system = os.environ.get(VARIABLE), os.environ.get("XDG_RUNTIME_DIR")
    if given:
        folder = Path(given)
    elif system and Path(system).is_dir():
        folder = Path(system) / "sagellm"
    else:
        folder = Path(tempfile.gettempdir()) / f"sagellm-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = folder.lstat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid() or state.st_mode & 0o077:
        raise ConfigError(
            f"the runtime folder {folder} must be yours alone: chmod 700 it, or name another in {VARIABLE}"
        )
    return folder
