"""Who a request is charged to when tenants share an engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b


def hash_of(text: str) -> int:
    """Return a 63-bit number that stands for a name in columns; equal in every process."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True, slots=True)
class Tenant:
    """A user of a shared engine. The server derives it from the API key, never from the body.

    `weight` is its share of the engine beside others. Priorities order requests within a tenant;
    those of a trusted tenant also hold across tenants.
    """

    name: str = "default"
    weight: float = 1.0
    is_trusted: bool = False
    code: int = field(init=False, repr=False, compare=False)  # hash_of(name)

    def __post_init__(self) -> None:
        object.__setattr__(self, "code", hash_of(self.name))


DEFAULT_TENANT = Tenant()
"""The tenant of requests without one."""
