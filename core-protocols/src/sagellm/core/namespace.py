"""Who owns KV: part of the key in every cache and every tier."""

from __future__ import annotations

from typing import NamedTuple

PUBLIC = ""
"""The tenant of public namespaces. No principal has this name."""


class Namespace(NamedTuple):
    """Prefixes are shared inside one namespace and never across two.

    The server derives `tenant` from the API key, never from the body of a request. A client's
    `salt` can only narrow what it shares. `adapter` names what else changes KV (a LoRA).
    """

    tenant: str = "default"
    salt: str = ""
    adapter: str = ""

    @classmethod
    def public(cls, name: str, adapter: str = "") -> Namespace:
        """Return the namespace in which all tenants that name it share their prefixes."""
        return cls(PUBLIC, name, adapter)

    @property
    def is_public(self) -> bool:
        """Whether all tenants that name it share it."""
        return self.tenant == PUBLIC

    @property
    def account(self) -> str:
        """Who is charged for the blocks: the tenant, or the public namespace as a whole."""
        return f"public:{self.salt}" if self.is_public else self.tenant


DEFAULT = Namespace()
"""The namespace of calls without one; private to its tenant like any other."""
