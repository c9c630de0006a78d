"""Network interfaces that are up, by psutil."""

from __future__ import annotations

import socket

import psutil

from sagellm.comm.tree import Tree
from sagellm.core import NetworkInterface

_INTERNET = (socket.AF_INET, socket.AF_INET6)


def read_network(tree: Tree) -> tuple[NetworkInterface, ...]:
    """Read the interfaces of the running machine; a foreign root has none to ask."""
    if not tree.is_this_machine:
        tree.warn("network interfaces are read of the running machine alone: left out below another root")
        return ()
    addresses = psutil.net_if_addrs()
    interfaces = []
    for name, stats in sorted(psutil.net_if_stats().items()):
        if not stats.isup:
            continue
        flags = getattr(stats, "flags", "").split(",")  # psutil before 5.9.3 has none
        entries = [entry for entry in addresses.get(name, []) if entry.family in _INTERNET]
        interfaces.append(
            NetworkInterface(
                name=name,
                addresses=tuple(entry.address.partition("%")[0] for entry in entries),
                speed_mbit=max(0, stats.speed),
                is_loopback="loopback" in flags or name == "lo",
            )
        )
    return tuple(interfaces)
