"""The names of ignored fields, as an answer lists them in `X-Sagellm-Ignored`."""

from __future__ import annotations

import re

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,96}")
_MAX_NAMES = 32


class IgnoredFields:
    """Collects the names of the fields of one body that are ignored.

    With `takes_unknown`, fields that no table knows are among them; otherwise they are refused. Holds a few
    short names however many a body has.
    """

    def __init__(self, *, takes_unknown: bool = False) -> None:
        self.takes_unknown = takes_unknown
        self._names: dict[str, None] = {}  # an ordered set

    def add(self, name: str) -> None:
        """Add a name; one that is invalid in a header becomes `?`."""
        if len(self._names) <= _MAX_NAMES:
            self._names[name if _NAME.fullmatch(name) else "?"] = None

    def header(self) -> tuple[bytes, bytes] | None:
        """Return the header that lists the first 32 names, None if there are none."""
        if not self._names:
            return None
        names = list(self._names)
        rest = ["..."] if len(names) > _MAX_NAMES else []
        return b"x-sagellm-ignored", ", ".join(names[:_MAX_NAMES] + rest).encode()
