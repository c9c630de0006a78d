"""Reads the API keys of a file that only its owner may read."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable

from sagellm.core import ConfigError
from sagellm.engines.config.sections import ServerConfig

_MAX_BYTES = 1 << 20
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def with_key_file(settings: ServerConfig, warn: Callable[[str], None]) -> ServerConfig:
    """Return the settings with the keys of `api_key_file` among `api_keys`, and without the file.

    A line that begins with '#' is a comment.

    The file is read once, so that it may be a pipe. `warn` is called if others may read it. Raises
    ConfigError for a file that cannot be read or has no key.
    """
    path = settings.api_key_file
    if path is None:
        return settings
    try:
        with open(path, encoding="utf-8-sig") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(_MAX_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"server.api_key_file is {path!r}, which cannot be read: {reason}") from None
    lines = [line.strip() for line in text.splitlines()]
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys or len(text) > _MAX_BYTES:
        found = "no key" if not keys else f"more than {_MAX_BYTES} characters"
        raise ConfigError(f"server.api_key_file is {path!r}, which has {found}; write one key per line")
    if stat.S_ISREG(mode) and mode & _OTHERS:
        warn(
            f"server.api_key_file {path} has the mode {stat.S_IMODE(mode):04o}: others than its owner may "
            f"use it; change that with: chmod 600 {path}"
        )
    return settings.model_copy(update={"api_keys": (*settings.api_keys, *keys), "api_key_file": None})
