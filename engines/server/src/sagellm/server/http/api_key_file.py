"""Reads API keys from a file that only its owner should be able to read."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable

from sagellm.core import ConfigError
from sagellm.engines.config.sections import ServerConfig
from sagellm.server.http.api_keys import ApiKey

_MAX_BYTES = 1 << 20
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def with_key_file(settings: ServerConfig, warn: Callable[[str], None]) -> ServerConfig:
    """Return the settings with the file's keys added to `api_keys`, and `api_key_file` unset.

    A line has a key and its options (`api_keys`); one that begins with '#' is a comment. The file is read
    once, so it may be a pipe. `warn` is called if others may access it. Raises ConfigError for a file that
    cannot be read, has no key or exceeds 1 MiB, and for an invalid line, which it names by number.
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
    lines = {number: line.strip() for number, line in enumerate(text.splitlines(), 1)}
    lines = {number: line for number, line in lines.items() if line and not line.startswith("#")}
    keys = tuple(lines.values())
    if not keys or len(text) > _MAX_BYTES:
        found = "no key" if not keys else f"more than {_MAX_BYTES} characters"
        raise ConfigError(f"server.api_key_file is {path!r}, which has {found}; write one key per line")
    for number, line in lines.items():
        ApiKey.parse(line, f"server.api_key_file is {path!r}, line {number}")
    if stat.S_ISREG(mode) and mode & _OTHERS:
        warn(
            f"server.api_key_file {path} has mode {stat.S_IMODE(mode):04o}: users other than its owner may "
            f"access it; run: chmod 600 {path}"
        )
    return settings.model_copy(update={"api_keys": (*settings.api_keys, *keys), "api_key_file": None})
