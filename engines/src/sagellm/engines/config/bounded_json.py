"""Parses untrusted JSON within limits far above any real configuration."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

from sagellm.core import ConfigError
from sagellm.engines.config.shown import shown

_MAX_DEPTH = 32
_MAX_DIGITS = 40  # tokenizers write 10^30 for "no limit"
MAX_VALUES = 500_000
"""Commas and opening brackets, an upper bound on the values, at most about 100 bytes each."""


def parse_json(
    text: bytes,
    *,
    max_values: int = MAX_VALUES,
    object_hook: Callable[[dict[str, Any]], Any] | None = None,
    has_unique_names: bool = False,
) -> Any:
    """Return the value of a JSON text in UTF-8. The integer -0 is a float, as to the format's other parsers.

    Raises ConfigError for invalid JSON, more than 32 levels, integers of more than 40 digits, more than
    `max_values` values or, if demanded, an object with two entries of one name: of these, other parsers may
    take the first. The message does not name the source: "it ...".
    """
    if sum(text.count(mark) for mark in (b",", b"[", b"{")) > max_values:
        raise ConfigError(f"it has more than {max_values} values")
    try:
        found = json.loads(
            text.decode(),
            object_hook=object_hook,
            object_pairs_hook=_unique if has_unique_names else None,
            parse_int=_parse_int,
        )
    except ConfigError:
        raise
    except RecursionError as error:
        raise ConfigError(f"it is nested more than {_MAX_DEPTH} deep") from error
    except ValueError as error:  # bad JSON, or bytes that are not text
        raise ConfigError(f"it is not valid JSON: {error}") from error
    _check_depth(found, _MAX_DEPTH)
    return found


def _parse_int(digits: str) -> float:
    if len(digits) > _MAX_DIGITS:
        raise ConfigError(f"it has a number of {len(digits)} digits; the limit is {_MAX_DIGITS}")
    return int(digits) if digits != "-0" else -0.0


def _unique(entries: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(entries)
    if len(found) < len(entries):
        twice = next(name for name, count in Counter(name for name, _ in entries).items() if count > 1)
        raise ConfigError(f"it has two entries {shown(twice)} in one object")
    return found


def _check_depth(value: Any, remaining: int) -> None:
    """Raise ConfigError for deeper nesting, so that code may recurse over the value."""
    if not isinstance(value, dict | list):
        return
    if not remaining:
        raise ConfigError(f"it is nested more than {_MAX_DEPTH} deep")
    for nested in value.values() if isinstance(value, dict) else value:
        if isinstance(nested, dict | list):
            _check_depth(nested, remaining - 1)
