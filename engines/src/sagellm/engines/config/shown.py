"""How a given value is quoted in an error message."""

from __future__ import annotations

from collections.abc import Sequence

_MAX_CHARACTERS = 200
_NUM_NAMED = 5


def shown(value: object) -> str:
    """Return the value's repr, cut after 200 characters."""
    if isinstance(value, int) and value.bit_length() > 128:  # repr fails for very long ones
        return f"an integer of {value.bit_length()} bits"
    return clipped(repr(value))


def clipped(text: str, max_characters: int = _MAX_CHARACTERS) -> str:
    """Return the text, cut after `max_characters`."""
    return text if len(text) <= max_characters else f"{text[:max_characters]}…"


def first_few(names: Sequence[str]) -> str:
    """Return the first five names, and how many more there are; what a terminal might obey is escaped."""
    rest = len(names) - _NUM_NAMED
    some = (clipped(name if name.isprintable() else repr(name)) for name in names[:_NUM_NAMED])
    return ", ".join(some) + (f" and {rest:,} more" if rest > 0 else "")
