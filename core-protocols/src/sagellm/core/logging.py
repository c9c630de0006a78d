"""Logging in one form for all packages: the standard library's, under the name `sagellm`.

A library configures nothing by itself; a program calls `configure` once.
"""

from __future__ import annotations

import json
import logging
import os
import sys

from sagellm.core.errors import ConfigError

ROOT = "sagellm"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_FORMAT = "SAGELLM_LOG_FORMAT"


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module; pass `__name__`."""
    return logging.getLogger(name)


class JSONFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, and the exception if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Render one record."""
        entry = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def configure(level: str = "WARNING", *, as_json: bool | None = None) -> None:
    """Send the records of all sageLLM packages to standard error. A second call replaces the first.

    With `as_json` None the variable SAGELLM_LOG_FORMAT decides: plain, which is the default, or json. Raises
    ConfigError for another value, and for an unknown level (see LEVELS); case does not matter.
    """
    if as_json is None:
        as_json = _is_json_wanted(os.environ.get(_FORMAT, "plain"))
    if level.upper() not in LEVELS:
        raise ConfigError(f"log level {level!r}; it must be one of {', '.join(LEVELS)}")
    handler = logging.StreamHandler(sys.stderr)
    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%m-%d %H:%M:%S")
    handler.setFormatter(JSONFormatter() if as_json else plain)
    logger = logging.getLogger(ROOT)
    for old in list(logger.handlers):
        logger.removeHandler(old)
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False


def _is_json_wanted(value: str) -> bool:
    if value not in ("plain", "json"):
        raise ConfigError(f"the environment variable {_FORMAT} is {value!r}; it must be plain or json")
    return value == "json"
