"""The loggers of all packages: the standard library's, under the name `sagellm`."""

from __future__ import annotations

import logging

from sagellm.core._lazy import lazy
from sagellm.core._moved import with_moved_names


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module; pass `__name__`."""
    return logging.getLogger(name)


_MOVED = {"sagellm.engines.logging": "JSONFormatter LEVELS configure fields is_json"}

__getattr__ = with_moved_names(__name__, lazy(__name__, {}), _MOVED)
