"""Makes objects of frozen dataclasses quickly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def unchecked(cls: type[T], given: Mapping[str, Any] | None = None, /, **fields: Any) -> T:
    """Return an object of a frozen dataclass without slots, in a third of the time of its constructor.

    `given` are fields too, as of the object to copy. `__post_init__` does not run, and fields that are left
    out have their defaults. For what every step makes.
    """
    made = object.__new__(cls)
    object.__setattr__(made, "__dict__", fields if given is None else {**given, **fields})
    return made
