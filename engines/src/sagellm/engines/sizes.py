"""Human-readable sizes."""

from __future__ import annotations

import re

from sagellm.core import ConfigError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(|[KMGTkmgt]?i?[Bb]?)")
_UNITS = {
    prefix + infix + suffix: float(base) ** power
    for power, prefix in enumerate(("", "k", "m", "g", "t"))
    for infix, base in (("", 1000), ("i", 1024))
    for suffix in ("", "b")
    if prefix or not infix
}


def format_bytes(num_bytes: int) -> str:
    """Write a size in the largest binary unit that keeps it at one or more: `23.4 GiB`."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.4g} {unit}"


def parse_bytes(text: object, key: str) -> int:
    """Read a size: a number of bytes, or one with a unit (`4GiB`, `500 MB`). Raises ConfigError."""
    match = _SIZE.fullmatch(str(text).strip()) if not isinstance(text, bool) else None
    if match is None:
        raise ConfigError(f"{key} is {text!r}; give bytes, as in 4GiB, 500MB or 1000000")
    number, unit = match.groups()
    return round(float(number) * _UNITS[unit.lower()])
