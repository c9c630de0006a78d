"""The version of the plugin protocols.

A plugin module states the version it was written for (`SAGELLM_API = 0`). While the version is 0
the protocols may change without notice and a module that states nothing means 0; from version 1
on, N and N - 1 are accepted.
"""

from __future__ import annotations

SAGELLM_API = 0


def is_compatible(api: int) -> bool:
    """Say whether a plugin written for protocol version `api` works with this core."""
    return api == SAGELLM_API or (SAGELLM_API >= 2 and api == SAGELLM_API - 1)
