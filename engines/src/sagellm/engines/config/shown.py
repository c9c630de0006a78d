"""How a value that someone gave is quoted in a message."""

from __future__ import annotations

_MAX_CHARACTERS = 200


def shown(value: object) -> str:
    """Return the value's repr, cut after 200 characters."""
    text = repr(value)
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}…"
