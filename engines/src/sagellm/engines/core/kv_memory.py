"""The KV of the device, as whoever copies it must know it."""

from __future__ import annotations

from typing import NamedTuple

from sagellm.core import ForwardBackendProtocol, KVIdentity, KVLayout


class KVMemory(NamedTuple):
    """Who holds the KV, how it lies there, and whose it is."""

    backend: ForwardBackendProtocol
    layout: KVLayout
    identity: KVIdentity
