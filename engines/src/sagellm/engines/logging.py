"""How a program that runs an engine logs: plain lines or JSON, to standard error, for all packages alike.

A library configures nothing by itself; a program calls `configure` once.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from sagellm.core.errors import ConfigError

ROOT = "sagellm"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_FORMAT = "SAGELLM_LOG_FORMAT"


def fields(**values: object) -> Mapping[str, object]:
    """Return `extra` of a log call: what a line of JSON has besides its message; None is left out.

    For example `logger.info("…", extra=fields(request_id=request_id))`. Plain lines have the message alone.
    """
    return {"fields": {name: value for name, value in values.items() if value is not None}}


class JSONFormatter(logging.Formatter):
    """One JSON object per line: time (UTC), level, logger, message, the record's fields, the exception."""

    def format(self, record: logging.LogRecord) -> str:
        """Render one record."""
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= getattr(record, "fields", {})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


def configure(level: str = "WARNING", *, as_json: bool | None = None) -> None:
    """Send the records of all sageLLM packages to standard error. A second call replaces the first.

    With `as_json` None the variable SAGELLM_LOG_FORMAT decides: plain, which is the default, or json. JSON
    takes in other libraries' warnings and errors too, so that every line can be parsed. Raises ConfigError
    for another value, and for an unknown level (see LEVELS); case does not matter.
    """
    if as_json is None:
        as_json = _is_json_wanted(os.environ.get(_FORMAT, "plain"))
    if level.upper() not in LEVELS:
        raise ConfigError(f"log level {level!r}; it must be one of {', '.join(LEVELS)}")
    handler = logging.StreamHandler(sys.stderr)
    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%m-%d %H:%M:%S")
    handler.setFormatter(JSONFormatter() if as_json else plain)
    logger, others = logging.getLogger(ROOT), logging.getLogger()
    for old in list(logger.handlers):
        logger.removeHandler(old)
        others.removeHandler(old)
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False
    if as_json:
        others.addHandler(handler)
    logging.captureWarnings(as_json)


def is_json() -> bool:
    """Say whether `configure` made the log lines of JSON."""
    return any(isinstance(each.formatter, JSONFormatter) for each in logging.getLogger(ROOT).handlers)


def _is_json_wanted(value: str) -> bool:
    if value not in ("plain", "json"):
        raise ConfigError(f"the environment variable {_FORMAT} is {value!r}; it must be plain or json")
    return value == "json"
