"""Whose KV it is: part of the key in every cache and every tier."""

from __future__ import annotations

from typing import NamedTuple


class Namespace(NamedTuple):
    """Prefixes are shared inside one namespace and never across two.

    The server derives `tenant` from the API key, never from the body of a request. A client's
    `salt` can only narrow what it shares. `adapter` names what else changes KV (a LoRA).
    """

    tenant: str = "default"
    salt: str = ""
    adapter: str = ""


DEFAULT = Namespace()
"""The namespace of calls that name none; private to its tenant like any other."""
